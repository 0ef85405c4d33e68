"""Steps in float32 over a million parameters, and rows that depend on each other."""

import jax
import jax.numpy as jnp
import numpy as np
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


def test_identical_rows_are_one():
    def row(p):
        return jnp.sum(p**2) - 1.0

    p, u = jnp.linspace(0.1, 1, 50), jnp.cos(jnp.arange(50.0))
    once = cx.project(u, cx.compose(row, gamma=0.5), p)
    twice = cx.project(u, cx.compose(row, row, gamma=0.5), p)
    np.testing.assert_allclose(twice.update, once.update, atol=1e-5)
    assert all(bool(report.resolved) for report in twice.reports.values())
