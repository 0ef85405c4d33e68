"""`lstsq` around `jax.shard_map`, inside it, and under `jax.vmap` with an axis name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import constrainx as cx
from tests.linalg import dense

ROWS = PartitionSpec("devices")
A = dense.matrix(8, 3).astype(np.float32)
b = np.arange(8, dtype=np.float32)
LIKE = jnp.zeros(3)


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))


def by_rows(v, A, mesh):
    specs = (ROWS, PartitionSpec())
    return jax.shard_map(lambda A, v: A @ v, mesh=mesh, in_specs=specs, out_specs=ROWS)(A, v)


@pytest.mark.parametrize("solver", [cx.LSMR(), cx.Cholesky()], ids=lambda s: type(s).__name__)
def test_a_matvec_may_call_shard_map(mesh, solver):
    def solve(A, b):
        return cx.lstsq(lambda v: by_rows(v, A, mesh), b, like=LIKE, solver=solver)[0]

    np.testing.assert_allclose(jax.jit(solve)(A, b), dense.solve(A, b), rtol=1e-4)
    # With A as a constant, nothing but the operator says on which devices to run.
    np.testing.assert_allclose(jax.jit(lambda b: solve(A, b))(b), dense.solve(A, b), rtol=1e-4)


def test_a_matvec_that_calls_shard_map_has_gradients(mesh):
    def total(b, matvec):
        return jnp.sum(cx.lstsq(matvec, b, like=LIKE)[0])

    found = jax.jit(jax.grad(lambda b: total(b, lambda v: by_rows(v, A, mesh))))(b)
    np.testing.assert_allclose(found, np.linalg.pinv(A).sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "specs"),
    [("b", (ROWS, ROWS)), ("matvec", (ROWS, PartitionSpec()))],
    ids=["b", "closure"],
)
def test_lstsq_inside_a_shard_map_is_an_error(mesh, name, specs):
    def solve(A, b):
        return cx.lstsq(lambda v: A @ v, b[:2], like=LIKE)[0]

    inside = jax.shard_map(solve, mesh=mesh, in_specs=specs, out_specs=ROWS)
    with pytest.raises(TypeError, match=f"`{name}` varies over the mesh axis 'devices'.*outside"):
        jax.jit(inside)(A, b)


def test_each_device_may_solve_its_own_problem(mesh):
    def solve(A, b):
        return cx.lstsq(lambda v: A[0] @ v, b, like=LIKE)[0][None]

    scaled = np.stack([k * A for k in (1.0, 2.0, 3.0, 4.0)])
    inside = jax.shard_map(
        solve, mesh=mesh, in_specs=(ROWS, PartitionSpec()), out_specs=ROWS, check_vma=False
    )
    expected = [dense.solve(one, b) for one in scaled]
    np.testing.assert_allclose(jax.jit(inside)(scaled, b), expected, rtol=1e-4)


def test_vmap_may_have_an_axis_name():
    def solve(b, scale):
        total = jax.lax.psum(b, "lane")
        index = 1.0 + jax.lax.axis_index("lane")
        return cx.lstsq(lambda v: index * scale * (A @ v), total, like=LIKE)[0]

    x = jax.vmap(solve, in_axes=(0, None), axis_name="lane")(jnp.stack([b, 2 * b]), 2.0)
    np.testing.assert_allclose(x[1], dense.solve(4 * A, 3 * b), rtol=1e-4)


def test_a_sum_over_lanes_in_the_operator_is_an_error():
    def solve(b):
        return cx.lstsq(lambda v: jax.lax.psum(A @ v, "lane"), b, like=LIKE)[0]

    with pytest.raises(TypeError, match="`matvec` communicates over the named axis 'lane'"):
        jax.vmap(solve, axis_name="lane")(jnp.stack([b, b]))
