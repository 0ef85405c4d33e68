"""Vectors that are pytrees, with leaves of different shapes and dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import constrainx as cx
from tests.linalg import dense

SOLVERS = [cx.LSMR(), cx.CG(), cx.Cholesky(), cx.QR()]


def tree_problem(dtypes):
    """A map from {"w": (3, 2), "b": (2,)} to ((4,), (3, 2)), and the matrix that it is."""
    rng = np.random.default_rng(0)
    M = rng.normal(size=(10, 8)) / 3
    first, second = dtypes

    def matvec(v, M):
        flat = jnp.concatenate([v["w"].reshape(-1).astype(M.dtype), v["b"].astype(M.dtype)])
        out = M @ flat
        return out[:4].astype(first), out[4:].reshape(3, 2).astype(second)

    like = {"w": jnp.zeros((3, 2), first), "b": jnp.zeros(2, second)}
    b = rng.normal(size=10)
    return M, matvec, like, (jnp.asarray(b[:4], first), jnp.asarray(b[4:].reshape(3, 2), second))


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in tree])


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_solutions_have_the_structure_and_shapes_of_like(solver):
    M, matvec, like, b = tree_problem((jnp.float32, jnp.float32))
    x, info = cx.lstsq(matvec, b, jnp.asarray(M, jnp.float32), like=like, solver=solver)
    assert jax.tree.map(jnp.shape, x) == {"w": (3, 2), "b": (2,)}
    assert info.converged
    expected = dense.solve(M, flat(b))
    np.testing.assert_allclose(flat([x["w"], x["b"]]), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "solver",
    # CG cannot do better than the precision of the operator, and has to be told; LSMR notices.
    [cx.LSMR(), cx.CG(rtol=1e-2), cx.Cholesky(), cx.QR()],
    ids=lambda s: type(s).__name__,
)
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_low_precision_leaves_keep_their_dtype(solver, dtypes):
    M, matvec, like, b = tree_problem(dtypes)
    x, _ = cx.lstsq(matvec, b, jnp.asarray(M, jnp.float32), like=like, damp=0.1, solver=solver)
    assert (x["w"].dtype, x["b"].dtype) == dtypes
    expected = dense.solve(M, flat(b), 0.1)
    error = np.linalg.norm(flat([x["w"], x["b"]]) - expected) / np.linalg.norm(expected)
    assert error < 0.05  # eight bits of mantissa in the operator itself


def test_the_recurrence_is_in_float32_for_bfloat16_leaves():
    """Storage in bfloat16, arithmetic in float32: the identity is solved to the last bit."""
    rng = np.random.default_rng(0)
    like = jnp.zeros(1000, jnp.bfloat16)
    b = jnp.asarray(rng.normal(size=1000), jnp.bfloat16)
    x, info = cx.lstsq(lambda v: v, b, like=like)
    np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(b, np.float32))
    assert info.residual_norm.dtype == jnp.float32
    assert info.converged


@pytest.mark.parametrize("dtypes", [("float64", "float64"), ("float32", "float64")])
def test_float64_is_used_when_enabled(x64, dtypes):
    M, matvec, like, b = tree_problem(dtypes)
    x, info = cx.lstsq(matvec, b, jnp.asarray(M), like=like, solver=cx.LSMR(rtol=1e-12))
    assert (x["w"].dtype, x["b"].dtype) == dtypes
    assert info.residual_norm.dtype == jnp.float64
    tolerance = 1e-10 if dtypes[0] == "float64" else 1e-4
    np.testing.assert_allclose(
        flat([x["w"], x["b"]]), dense.solve(M, flat(b)), rtol=tolerance, atol=tolerance
    )


def test_gradients_have_the_dtypes_of_their_inputs():
    M, matvec, like, b = tree_problem(("float32", "bfloat16"))

    def loss(b, M):
        x, _ = cx.lstsq(matvec, b, M, like=like, damp=0.1)
        return jnp.sum(x["w"]) + jnp.sum(x["b"].astype(jnp.float32))

    d_b, d_M = jax.grad(loss, argnums=(0, 1))(b, jnp.asarray(M, jnp.float32))
    assert [leaf.dtype for leaf in d_b] == [jnp.float32, jnp.bfloat16]
    expected = np.linalg.solve(M.T @ M + 0.01 * np.eye(8), M.T).T @ np.ones(8)
    np.testing.assert_allclose(flat(d_b), expected, rtol=0.1, atol=0.05)
    assert d_M.dtype == jnp.float32


def test_vectors_may_be_scalars_and_nested_containers():
    tree = {"a": jnp.float32(2.0), "b": [jnp.ones((2, 1)), (jnp.ones(3),)]}
    x, _ = cx.lstsq(lambda v: jax.tree.map(lambda leaf: 2 * leaf, v), tree, like=tree)
    assert jax.tree.structure(x) == jax.tree.structure(tree)
    for leaf, source in zip(jax.tree.leaves(x), jax.tree.leaves(tree), strict=True):
        np.testing.assert_allclose(leaf, source / 2, rtol=1e-6)


@pytest.mark.parametrize("make", [float, jnp.asarray, np.float64], ids=["python", "weak", "numpy"])
def test_numbers_are_float64_when_enabled(x64, make):
    for solve in (cx.lstsq, jax.jit(cx.lstsq, static_argnums=0)):
        x, info = solve(lambda v: 3.0 * v, make(1 / 3), like=make(1.0))
        assert x.dtype == info.residual_norm.dtype == jnp.float64
        np.testing.assert_allclose(x, 1 / 9, rtol=1e-15)


def test_like_may_be_shapes_only():
    like = jax.ShapeDtypeStruct((3,), jnp.float32)
    x, _ = cx.lstsq(lambda v: v, jnp.arange(3.0), like=like)
    np.testing.assert_allclose(x, np.arange(3.0), rtol=1e-6)


def test_no_leaf_is_ever_ravelled():
    """No reshape and no concatenation of a solution-sized array, in the value or the gradient."""
    like = {"w": jnp.zeros((30, 20)), "b": jnp.zeros((20, 7))}
    direction = jax.tree.map(lambda leaf: leaf + 0.5, like)

    def loss(direction):
        def matvec(v):
            return jnp.stack([jnp.sum(d * v[k]) for k, d in direction.items()])

        x, _ = cx.lstsq(matvec, jnp.ones(2), like=like)
        return sum(jnp.sum(leaf**2) for leaf in x.values())

    text = jax.jit(jax.grad(loss)).lower(direction).as_text()
    for line in text.splitlines():
        if "stablehlo.reshape" in line or "stablehlo.concatenate" in line:
            assert "600x" not in line
            assert "740x" not in line
