"""The small dense problem: scales, ranks and active sets, against exact conditions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from constrainx.step._multipliers import (
    ROWS_FACTORISED,
    find_active_rows,
    solve_by_gradients,
    solve_gram,
)


def draw_problem(rng, *, rows, size, scales, metric, duplicate, equalities):
    """Rows J, right-hand side e with a feasible point J x ≥ e, and a metric D."""
    J = rng.normal(size=(rows, size))
    if duplicate:
        J[-1] = J[0] * rng.uniform(0.5, 2)
    J *= 10.0 ** rng.uniform(-scales, scales, size=(rows, 1))
    D = 10.0 ** rng.uniform(-metric / 2, metric / 2, size=size)
    inequality = np.arange(rows) >= equalities
    slack = np.abs(rng.normal(size=rows)) * (rng.uniform(size=rows) < 0.5) * inequality
    lengths = np.linalg.norm(J * np.sqrt(D), axis=1)
    return J, J @ (rng.normal(size=size) * np.sqrt(D)) - slack * lengths, inequality, D


@jax.jit
def solve(gram, excess, inequality):
    active, found = find_active_rows(gram, excess, jnp.ones(len(excess), bool), inequality)
    return solve_gram(gram, excess, active), found


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("rows", "size"), [(3, 8), (8, 20), (8, 3), (16, 6)])
def test_random_quadratic_programs_satisfy_their_optimality_conditions(x64, dtype, rows, size):
    """Scales of 10^±6, metrics of ratio 10^8, duplicates, more rows than parameters.

    λ solves the program exactly if, in rows of unit length: λ ≥ 0, G λ ≥ e, and λ (G λ − e) = 0.
    """
    rng = np.random.default_rng(rows * size)
    tolerance = 1e-3 if dtype == np.float32 else 1e-9
    unresolved = 0
    for _ in range(150):
        scales = rng.choice([0, 3, 6]) if dtype == np.float64 else rng.choice([0, 2, 3])
        J, excess, inequality, D = draw_problem(
            rng,
            rows=rows,
            size=size,
            scales=scales,
            metric=rng.choice([0, 4, 8]),
            duplicate=rng.uniform() < 0.3,
            equalities=int(rng.integers(0, 2)) if size > rows else 0,
        )
        exact = (J * D) @ J.T
        found, ok = solve(exact.astype(dtype), excess.astype(dtype), inequality)
        if not ok:
            unresolved += 1
            continue
        lengths = np.sqrt(np.diag(exact))
        multipliers = np.asarray(found, np.float64) * lengths
        unit = exact / lengths[:, None] / lengths
        left = unit @ multipliers - excess / lengths
        size_of_terms = np.max(np.abs(excess) / lengths + np.abs(unit) @ np.abs(multipliers))
        short = np.where(inequality, np.maximum(-left, 0), np.abs(left))
        assert np.max(short) <= tolerance * size_of_terms
        assert np.min(np.where(inequality, multipliers, 0)) >= -1e-6 * size_of_terms
        assert np.max(np.abs(inequality * multipliers * left)) <= tolerance * size_of_terms**2
    # In float32 a metric of ratio 10^8 leaves some rows that only differ in rounding.
    assert unresolved <= (15 if dtype == np.float32 else 2)


def test_an_infeasible_program_says_so(x64):
    J = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    excess = jnp.array([1.0, 1.0, 0.5])  # x ≥ 1 and −x ≥ 1
    found, ok = solve(J @ J.T, excess, jnp.ones(3, bool))
    assert not ok
    assert np.all(np.isfinite(found))


@pytest.mark.parametrize("factor", [1.0, 3.0, 1e-4, 1e5])
def test_rows_that_contradict_share_what_they_cannot_both_have(factor):
    gram = jnp.array([[1.0, factor], [factor, factor**2]]) * (1 + 1e-7)
    multipliers = solve_gram(gram, jnp.array([1.0, -factor]), jnp.ones(2, bool))
    np.testing.assert_allclose(gram @ multipliers / jnp.array([1.0, factor]), 0, atol=1e-4)
    consistent = solve_gram(gram, jnp.array([1.0, factor]), jnp.ones(2, bool))
    np.testing.assert_allclose(gram @ consistent, [1.0, factor], rtol=1e-4)


def test_rows_of_any_scale_are_solved_alike():
    rng = np.random.default_rng(0)
    J = rng.normal(size=(4, 9)).astype(np.float32)
    scales = np.array([1e-12, 1e-3, 1e4, 1e12], np.float32)
    right = rng.normal(size=4).astype(np.float32)
    plain = solve_gram(jnp.asarray(J @ J.T), jnp.asarray(right), jnp.ones(4, bool))
    scaled = J * scales[:, None]
    gram = jnp.asarray(scaled @ scaled.T)
    found = solve_gram(gram, jnp.asarray(right * scales), jnp.ones(4, bool))
    np.testing.assert_allclose(found * scales, plain, rtol=1e-4)


MANY = ROWS_FACTORISED + 4


@pytest.mark.parametrize("kind", ["independent", "dependent", "contradicting", "ill-conditioned"])
def test_many_rows_are_solved_like_few(x64, kind):
    """By conjugate gradients where they converge, and otherwise by a factorisation."""
    rng = np.random.default_rng(0)
    J = rng.normal(size=(MANY, 1500))
    right = rng.normal(size=MANY)
    if kind in ("dependent", "contradicting"):
        J[1] = J[0]
        right[1] = right[0] if kind == "dependent" else -right[0]
    if kind == "ill-conditioned":
        J = J[:, :1] + np.logspace(-2, -3.5, MANY)[:, None] * J
    lengths = np.linalg.norm(J, axis=1)
    unit = J / lengths[:, None]
    gram = J @ J.T
    active = jnp.ones(MANY, bool)
    _, converged = jax.jit(solve_by_gradients)(unit @ unit.T, right / lengths)
    assert bool(converged) == (kind in ("independent", "dependent"))
    found = jax.jit(solve_gram)(jnp.asarray(gram), jnp.asarray(right), active)
    wanted = np.linalg.pinv(unit @ unit.T, rcond=1e-12, hermitian=True) @ (right / lengths)
    tolerance = 1e-6 if kind == "ill-conditioned" else 1e-9
    np.testing.assert_allclose(
        found * lengths, wanted, atol=tolerance * np.linalg.norm(wanted, np.inf)
    )


def test_the_solution_for_many_rows_can_be_differentiated(x64):
    rng = np.random.default_rng(0)
    J, K = rng.normal(size=(2, MANY, 1500))
    right, active = jnp.asarray(rng.normal(size=MANY)), jnp.ones(MANY, bool)

    def solve(t):
        rows = J + t * K
        return jnp.sum(jnp.sin(100 * solve_gram(rows @ rows.T, right, active)))

    slope = jax.jit(jax.grad(solve))(0.0)
    rise = (jax.jit(solve)(1e-5) - jax.jit(solve)(-1e-5)) / 2e-5
    np.testing.assert_allclose(slope, rise, rtol=1e-5)
