"""Derivatives of a damped solution, for λ from 1e-8 to 1e2, against dense formulas in float64."""

import functools

import jax
import numpy as np
import pytest

import constrainx as cx
from tests.linalg import dense

TIGHT = cx.LSMR(rtol=1e-14, condition_limit=1e15)
CLOSE = cx.CG(rtol=1e-12)  # compiles faster
DAMPINGS = [1e2, 1.0, 1e-2, 1e-4, 1e-6, 1e-8]
SHAPES = [(24, 12), (12, 24)]  # each is compiled once for a solver, which takes most of the time


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


@pytest.mark.parametrize("shape", SHAPES)
def test_derivatives_to_a_tight_tolerance(x64, shape):
    """Without full rank ∇A is of the order of 1/λ², and its error is small relative to that."""
    for rank in (12, 8):
        A, b, g = problem(shape, rank)
        for damp in DAMPINGS:
            found = GRADIENT(A, b, damp, g, TIGHT, False)
            error = errors(found, exact_gradient(A, b, damp, g, rank))
            limit = 1e-11 if rank == 12 else 1e-10 if damp >= 1e-4 else 1e-4
            assert max(error) < limit, (rank, damp, error)


def test_derivatives_with_a_promise_of_full_rank(x64):
    A, b, g = problem((12, 24))
    for damp in DAMPINGS:
        found = GRADIENT(A, b, damp, g, TIGHT, True)
        assert max(errors(found, exact_gradient(A, b, damp, g))) < 1e-11, damp


@pytest.mark.parametrize(
    ("shape", "solver"),
    [(SHAPES[0], cx.LSMR()), (SHAPES[1], cx.LSMR()), ((12, 12), cx.LSMR()), (SHAPES[1], cx.CG())],
    ids=["tall", "wide", "square", "wide-CG"],
)
def test_derivatives_at_the_default_tolerance(x64, shape, solver):
    """The solver's own error, although a tolerance above λ hides all of A's null space from it."""
    for rank in (12, 8):
        A, b, g = problem(shape, rank)
        for damp in DAMPINGS:
            found = GRADIENT(A, b, damp, g, solver, False)
            assert max(errors(found, exact_gradient(A, b, damp, g, rank))) < 1e-3, (rank, damp)


@pytest.mark.parametrize("shape", SHAPES)
def test_derivatives_in_float32(shape):
    for rank, consistent in [(12, False), (8, False), (8, True)]:
        A, b, g = (array.astype(np.float32) for array in problem(shape, rank, consistent))
        U = np.linalg.svd(A.astype(np.float64))[0][:, :8]
        exact_b = U @ (U.T @ b) if consistent else b.astype(np.float64)
        for damp in DAMPINGS[:-1] if consistent else DAMPINGS:
            found = GRADIENT(A, b, np.float32(damp), g, cx.LSMR(), False)
            exact = exact_gradient(A.astype(np.float64), exact_b, damp, g, rank)
            assert max(errors(found, exact)) < 1e-3, (rank, consistent, damp)


@pytest.mark.parametrize("solver", [TIGHT, cx.LSMR()], ids=["tight", "default"])
@pytest.mark.parametrize("shape", SHAPES)
def test_derivatives_without_full_rank_of_a_consistent_system(x64, shape, solver):
    """y is of the order of one, but rounding leaves a small part of b outside the range."""
    A, b, g = problem(shape, rank=8, consistent=True)
    U = np.linalg.svd(A)[0][:, :8]
    for damp in DAMPINGS:
        found = GRADIENT(A, b, damp, g, solver, False)
        error = errors(found, exact_gradient(A, U @ (U.T @ b), damp, g, rank=8))
        tolerance = 1e-10 if solver is TIGHT else 1e-4
        assert max(error) < max(tolerance, 1e-14 / damp**2), (damp, error)


def test_a_direct_solver_needs_no_full_rank_with_damping(x64):
    A, b, g = problem((24, 12), rank=8)
    for damp in (1.0, 1e-2):
        found = GRADIENT(A, b, damp, g, cx.Cholesky(), False)
        assert max(errors(found, exact_gradient(A, b, damp, g, rank=8))) < 1e-8, damp


def second_by_matrix(A, b, g, direction, damp):
    """Two derivatives of ⟨g, x⟩ in forward mode, as A moves along."""

    def first(t):
        return jax.jvp(
            lambda t: weighted(A + t * direction, b, damp, g, CLOSE, False), (t,), (1.0,)
        )

    (_, found), (_, second) = jax.jvp(first, (0.0,), (1.0,))
    return found, second


def second_by_damping(A, b, g, direction, damp):
    """The derivative of ⟨g, x⟩ by λ in reverse mode, and how it changes as A moves along."""

    def by_damp(t):
        return jax.grad(weighted, argnums=2)(A + t * direction, b, damp, g, CLOSE, False)

    return jax.jvp(by_damp, (0.0,), (1.0,))


BY_MATRIX = jax.jit(second_by_matrix, static_argnums=4)
BY_DAMPING = jax.jit(second_by_damping)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [12, 8])
def test_forward_mode_and_second_derivatives(x64, shape, rank):
    """Also where A gains rank as it moves, which is smooth in a damped solution."""
    direction = 0.02 * np.random.default_rng(5).normal(size=shape)
    A, b, g = problem(shape, rank)

    def exact(t, damp, rank=None):
        by_A, _, by_damp = exact_gradient(A + t * direction, b, damp, g, rank)
        return np.array([np.sum(by_A * direction), by_damp])

    for damp in (1.0, 1e-3, 1e-6):
        step = 1e-5 if rank == 12 else 1e-2 * min(1e-3, damp)
        second = dense.derivative(functools.partial(exact, damp=damp), 0.0, step)
        expected = np.stack([exact(0.0, damp, rank), second])
        found = BY_DAMPING(A, b, g, direction, damp)
        np.testing.assert_allclose(found, expected[:, 1], rtol=1e-4, err_msg=f"{damp}")
    found = BY_MATRIX(A, b, g, direction, damp)
    np.testing.assert_allclose(found, expected[:, 0], rtol=1e-4)
