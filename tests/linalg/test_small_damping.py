"""Derivatives of a damped solution, for λ from 1e-8 to 1e2, against dense formulas in float64."""

import functools

import jax
import numpy as np
import pytest

import constrainx as cx
from tests.linalg import dense

TIGHT = cx.LSMR(rtol=1e-14, condition_limit=1e15)
DAMPINGS = [1e2, 1.0, 1e-2, 1e-4, 1e-6, 1e-8]
FULL_RANK = [(24, 12), (12, 24), (12, 12)]


def problem(shape, rank=None, consistent=False):
    rng = np.random.default_rng(3)
    A = dense.matrix(*shape, rank=rank, condition=10.0)
    b = A @ rng.normal(size=shape[1]) if consistent else rng.normal(size=shape[0])
    return A, b, rng.normal(size=shape[1])


def exact_gradient(A, b, damp, g, rank=None):
    """∇⟨g, x⟩ by A, b and λ: λ² y wᵀ − p xᵀ, p, and −2λ⟨w, x⟩, in singular vectors."""
    (m, n), k = A.shape, min(A.shape)
    U, s, Vt = np.linalg.svd(A)
    s[k if rank is None else rank :] = 0.0
    s_rows, s_columns = np.pad(s, (0, m - k)), np.pad(s, (0, n - k))
    in_U, in_V = U.T @ b, Vt @ g
    y = U @ (in_U / (s_rows**2 + damp**2))
    damp_squared_w = Vt.T @ (in_V * damp**2 / (s_columns**2 + damp**2))
    filtered = s / (s**2 + damp**2)
    x, p = Vt[:k].T @ (filtered * in_U[:k]), U[:, :k] @ (filtered * in_V[:k])
    by_damp = -2 * damp * np.sum(in_U[:k] * in_V[:k] * filtered / (s**2 + damp**2))
    return np.outer(y, damp_squared_w) - np.outer(p, x), p, by_damp


def weighted(A, b, damp, g, solver, full_rank):
    x, _ = cx.lstsq(
        lambda v, A: A @ v, b, A, like=jax.ShapeDtypeStruct(g.shape, g.dtype), damp=damp,
        solver=solver, full_rank=full_rank,
    )  # fmt: skip
    return g @ x


GRADIENT = jax.jit(jax.grad(weighted, argnums=(0, 1, 2)), static_argnums=(4, 5))


def errors(found, exact):
    """Compares each gradient relative to its norm, because small entries may be rounding."""
    return [np.linalg.norm(f - e) / np.linalg.norm(e) for f, e in zip(found, exact, strict=True)]


@pytest.mark.parametrize(
    ("shape", "full_rank"), [*((shape, False) for shape in FULL_RANK), ((12, 24), True)]
)
def test_derivatives_with_full_rank(x64, shape, full_rank):
    A, b, g = problem(shape)
    for damp in DAMPINGS:
        found = GRADIENT(A, b, damp, g, TIGHT, full_rank)
        assert max(errors(found, exact_gradient(A, b, damp, g))) < 1e-11, damp


@pytest.mark.parametrize("shape", [(24, 12), (12, 24)])
@pytest.mark.parametrize("solver", [cx.LSMR(), cx.CG()], ids=str)
def test_derivatives_with_full_rank_and_the_default_tolerance(x64, shape, solver):
    """The error of a derivative is that of the solver, whatever λ."""
    A, b, g = problem(shape)
    for damp in DAMPINGS:
        found = GRADIENT(A, b, damp, g, solver, False)
        assert max(errors(found, exact_gradient(A, b, damp, g))) < 1e-3, damp


@pytest.mark.parametrize("shape", [(24, 12), (12, 24)])
def test_derivatives_with_full_rank_in_float32(shape):
    A, b, g = (array.astype(np.float32) for array in problem(shape))
    for damp in DAMPINGS:
        found = GRADIENT(A, b, np.float32(damp), g, cx.LSMR(), False)
        wide = (array.astype(np.float64) for array in (A, b))
        assert max(errors(found, exact_gradient(*wide, damp, g))) < 1e-3, damp


@pytest.mark.parametrize("shape", FULL_RANK)
def test_derivatives_without_full_rank(x64, shape):
    """∇A is of the order of 1/λ², and its error is small relative to that."""
    A, b, g = problem(shape, rank=8)
    for damp in DAMPINGS:
        found = GRADIENT(A, b, damp, g, TIGHT, False)
        error = errors(found, exact_gradient(A, b, damp, g, rank=8))
        assert max(error) < (1e-10 if damp >= 1e-4 else 1e-4), (damp, error)


@pytest.mark.parametrize("shape", [(24, 12), (12, 24)])
@pytest.mark.parametrize("solver", [cx.LSMR(), cx.CG()], ids=str)
def test_derivatives_without_full_rank_at_the_default_tolerance(x64, shape, solver):
    """A solver with a tolerance above λ never sees what lies in A's null space."""
    A, b, g = problem(shape, rank=8)
    for damp in DAMPINGS:
        found = GRADIENT(A, b, damp, g, solver, False)
        assert max(errors(found, exact_gradient(A, b, damp, g, rank=8))) < 1e-3, damp


@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize("shape", [(24, 12), (12, 24)])
def test_derivatives_without_full_rank_in_float32(shape, consistent):
    A, b, g = (array.astype(np.float32) for array in problem(shape, 8, consistent))
    U = np.linalg.svd(A.astype(np.float64))[0][:, :8]
    exact_b = U @ (U.T @ b) if consistent else b.astype(np.float64)
    for damp in DAMPINGS[:-1] if consistent else DAMPINGS:
        found = GRADIENT(A, b, np.float32(damp), g, cx.LSMR(), False)
        exact = exact_gradient(A.astype(np.float64), exact_b, damp, g, rank=8)
        assert max(errors(found, exact)) < 1e-3, damp


@pytest.mark.parametrize("solver", [TIGHT, cx.LSMR()], ids=["tight", "default"])
@pytest.mark.parametrize("shape", FULL_RANK)
def test_derivatives_without_full_rank_of_a_consistent_system(x64, shape, solver):
    """y is of the order of one, but rounding leaves a small part of b outside the range."""
    A, b, g = problem(shape, rank=8, consistent=True)
    U = np.linalg.svd(A)[0][:, :8]
    for damp in DAMPINGS:
        found = GRADIENT(A, b, damp, g, solver, False)
        error = errors(found, exact_gradient(A, U @ (U.T @ b), damp, g, rank=8))
        tolerance = 1e-10 if solver is TIGHT else 1e-4
        assert max(error) < max(tolerance, 1e-14 / damp**2), (damp, error)


@pytest.mark.parametrize("shape", [(24, 12), (12, 24)])
def test_a_direct_solver_needs_no_full_rank_with_damping(x64, shape):
    A, b, g = problem(shape, rank=8)
    for damp in (1.0, 1e-2):
        found = GRADIENT(A, b, damp, g, cx.Cholesky(), False)
        assert max(errors(found, exact_gradient(A, b, damp, g, rank=8))) < 1e-8, damp


@functools.partial(jax.jit, static_argnums=5)
def tangent_and_second(A, b, damp, g, direction, solver):
    def along(t):
        return A + t * direction, b, damp * (1 + t), g, solver, False

    def gradient(t):
        return jax.grad(weighted, argnums=(0, 2))(*along(t))

    first = jax.jvp(lambda t: weighted(*along(t)), (0.0,), (1.0,))[1]
    return first, jax.jvp(gradient, (0.0,), (1.0,))[1]


@pytest.mark.parametrize("shape", [(24, 12), (12, 24)])
def test_forward_mode_and_second_derivatives_are_accurate(x64, shape):
    A, b, g = problem(shape)
    direction = 0.02 * np.outer(b, g)

    def moved(t):
        return exact_gradient(A + t * direction, b, damp * (1 + t), g)

    for damp in DAMPINGS:
        by_A, _, by_damp = moved(0.0)
        first, second = tangent_and_second(A, b, damp, g, direction, TIGHT)
        np.testing.assert_allclose(first, np.sum(by_A * direction) + damp * by_damp, rtol=1e-10)
        for position, found in zip((0, 2), second, strict=True):
            expected = dense.derivative(lambda t, i=position: moved(t)[i], 0.0)
            assert errors([found], [expected])[0] < 1e-7, (damp, position)
