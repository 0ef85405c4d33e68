"""Steps in float32 over a million parameters, and rows that depend on each other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import constrainx as cx

SIZE = 10**6


@pytest.mark.parametrize("rows", [2, 64])
def test_a_step_over_a_million_parameters_obeys_to_four_digits(rows):
    """The Jacobian's product with the update, in double precision on the host, is −γ c."""
    J = np.random.default_rng(0).normal(size=(rows, SIZE)).astype(np.float32) / 1e3
    p = jax.random.normal(jax.random.key(1), (SIZE,))
    constraint = cx.compose(lambda p: jnp.asarray(J) @ p - 3.0, gamma=0.5)
    found = jax.jit(lambda p: cx.project(jnp.cos(p), constraint, p, solver="gram"))(p)
    exact = J.astype(np.float64) @ np.asarray(found.update, np.float64)
    wanted = -0.5 * np.asarray(found.rows["constraint"], np.float64)
    assert np.max(np.abs(exact - wanted)) <= 1e-4 * np.linalg.norm(wanted) / np.sqrt(rows)


@pytest.mark.parametrize("seed", range(4))
def test_proportional_rows_over_a_million_parameters_stay_finite(seed):
    """mean(p²) − 1 and 3 mean(p²) − 3.3 contradict: the best step meets both halfway."""
    p = 1.02 * jax.random.normal(jax.random.key(seed), (SIZE,))

    def one(p):
        return jnp.mean(p**2) - 1.0

    def other(p):
        return 3 * jnp.mean(p**2) - 3.3

    constraints = cx.compose(one, other, gamma=1.0)
    found = jax.jit(lambda p: cx.project(jnp.zeros_like(p), constraints, p))(p)
    # In rows of unit length: two wishes for one number, of which the mean is taken.
    wanted = 0.5 * (1.0 + 1.1) - float(jnp.mean(p**2))
    moved = float(2 * jnp.mean(p * found.update))
    np.testing.assert_allclose(moved, wanted, atol=2e-3)
    assert float(jnp.linalg.norm(found.update)) < 1e3


def test_identical_rows_count_once():
    def row(p):
        return jnp.sum(p**2) - 1.0

    p, u = jnp.linspace(0.1, 1, 50), jnp.cos(jnp.arange(50.0))
    once = cx.project(u, cx.compose(row, gamma=0.5), p)
    twice = cx.project(u, cx.compose(row, row, gamma=0.5), p)
    np.testing.assert_allclose(twice.update, once.update, atol=1e-5)
    assert all(bool(report.resolved) for report in twice.reports.values())


@pytest.mark.parametrize("solver", ["gram", cx.LSMR(rtol=1e-6)], ids=["gram", "lsmr"])
def test_a_row_that_nothing_can_move_leaves_the_step_alone_and_is_not_resolved(solver):
    """Its value is −0.3 whatever p is, so that its gradient is rounding alone."""
    x = jnp.linspace(0.1, 1, 7)

    def stuck(p):
        def total(x):
            return jnp.sum(jnp.tanh(x * p) * 1.7 * p)

        return total(x) - total(-x) - 2 * jnp.sum(jnp.tanh(x * p) * p) * 1.7 - 0.3

    p = jnp.cos(jnp.arange(7.0))
    optimizer = cx.constrain(optax.sgd(0.1), stuck, method=cx.NullSpace(solver=solver))
    updates, state = jax.jit(optimizer.update)(p, optimizer.init(p), p)
    assert float(jnp.linalg.norm(updates)) <= 0.1 * float(jnp.linalg.norm(p)) * 1.001
    assert not cx.reports(state)["stuck"].resolved


def test_a_constraint_that_asks_for_a_long_step_gets_it():
    """From zero to a thousand, beside parameters that are small."""
    found = cx.project(jnp.zeros(3), cx.compose(lambda p: p[0] - 1e3, gamma=1.0), jnp.zeros(3))
    np.testing.assert_allclose(found.update, [1e3, 0, 0])
    assert found.reports["constraint"].resolved
