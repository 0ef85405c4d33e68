"""Least squares with operands spread over eight devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import constrainx as cx
from tests.linalg import dense

ROWS, COLUMNS = 48, 24
LAYOUTS = {
    "replicated": (P(), P()),
    "by row": (P("data"), P("data")),
    "by column": (P(None, "data"), P()),
}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def problem(shape=(ROWS, COLUMNS)):
    A = dense.matrix(*shape, condition=20.0)
    b = np.random.default_rng(0).normal(size=shape[0])
    return A, b


def solve(A, b):
    # A second leaf of another shape, so that the solution is a tree whose leaves are sharded apart.
    like = {"u": jnp.zeros(A.shape[1]), "w": jnp.zeros((8, 2))}

    def matvec(v, A):
        return A @ v["u"] + jnp.concatenate([v["w"].sum(axis=1)] * (A.shape[0] // 8))

    return cx.lstsq(matvec, b, A, like=like, solver=cx.LSMR(rtol=1e-13))


def loss(A, b):
    x, info = solve(A, b)
    return jnp.sum(jnp.sin(x["u"])) + jnp.sum(x["w"] ** 2), (x, info)


run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (COLUMNS, ROWS)], ids=["tall", "wide"])
def test_a_sharded_solve_matches_one_device(mesh, x64, layout, shape):
    A, b = problem(shape)
    (value, (x, info)), gradient = run(A, b)
    spec_A, spec_b = LAYOUTS[layout]
    sharded = (
        jax.device_put(A, NamedSharding(mesh, spec_A)),
        jax.device_put(b, NamedSharding(mesh, spec_b)),
    )
    (value_s, (x_s, info_s)), gradient_s = run(*sharded)
    assert info.converged
    assert info_s.converged
    np.testing.assert_allclose(value_s, value, rtol=1e-9)
    for mine, other in zip(
        jax.tree.leaves((x_s, gradient_s)), jax.tree.leaves((x, gradient)), strict=True
    ):
        assert np.linalg.norm(mine - other) <= 1e-8 * np.linalg.norm(other)


def count_collectives(text):
    """(name, elements) of each collective in compiled HLO."""
    pattern = (
        r"= \(?[a-z0-9]+\[([0-9,]*)\][^=]*? (all-gather|all-to-all|collective-permute|all-reduce)"
    )
    return [
        (name, int(np.prod([int(n) for n in dims.split(",") if n])))
        for dims, name in re.findall(pattern, text)
    ]


@pytest.mark.parametrize("solver", [cx.LSMR(), cx.CG(), cx.Cholesky()], ids=str)
def test_parameters_are_never_gathered(mesh, solver):
    """With sharded parameters and few rows, vectors the size of the solution stay sharded."""
    size = 8 * 512
    spec, stacked = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))
    rng = np.random.default_rng(0)
    directions = {
        name: jax.device_put(rng.normal(size=(3, size)).astype(np.float32), stacked)
        for name in ("w", "b")
    }
    like = {"w": jnp.zeros(size), "b": jnp.zeros(size)}

    def step(directions, b):
        def matvec(v):
            return sum(directions[k] @ v[k] for k in directions)

        x, info = cx.lstsq(matvec, b, like=like, solver=solver)
        return x, info

    compiled = (
        jax.jit(step, out_shardings=({"w": spec, "b": spec}, None))
        .lower(directions, jnp.ones(3))
        .compile()
    )
    found = count_collectives(compiled.as_text())
    assert any(name == "all-reduce" for name, _ in found)  # so the parser does see collectives
    assert all(count < size // 8 for _, count in found), found
    x, _ = compiled(directions, jnp.ones(3))
    J = np.concatenate([np.asarray(directions["w"]), np.asarray(directions["b"])], axis=1)
    expected = dense.solve(J, np.ones(3))
    np.testing.assert_allclose(np.concatenate([x["w"], x["b"]]), expected, rtol=1e-3, atol=1e-6)


def test_rows_follow_the_batch(mesh):
    """With sharded rows and replicated parameters, neither is gathered."""
    A, b = (value.astype(np.float32) for value in problem((8 * 128, 32)))
    A = jax.device_put(A, NamedSharding(mesh, P("data")))
    b = jax.device_put(b, NamedSharding(mesh, P("data")))
    compiled = (
        jax.jit(lambda A, b: cx.lstsq(lambda v: A @ v, b, like=jnp.zeros(32))[0])
        .lower(A, b)
        .compile()
    )
    found = count_collectives(compiled.as_text())
    assert found
    assert all(name == "all-reduce" and count <= 32 for name, count in found), found
