"""Several constraints, solved together by LSMR."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import constrainx as cx

MATRIX = jax.random.normal(jax.random.key(0), (40, 100)) / 10
RIGHT = jax.random.normal(jax.random.key(1), (40,))


def bend(p):
    return jnp.tanh(MATRIX @ p) - 0.5 * jnp.tanh(RIGHT)


def scale_rows(p):
    """Rows of lengths from one to a hundred."""
    return jnp.logspace(0, 2, 40) * bend(p)


def run(optimizer, parameters, goal, *, steps):
    """The parameters at the end, and in how many steps each constraint was not resolved."""

    def step(carry, _):
        p, state = carry
        gradients = jax.tree.map(jnp.subtract, p, goal)
        updates, state = optimizer.update(gradients, state, p)
        resolved = [r.resolved for r in state.constraints.reports.values()]
        return (optax.apply_updates(p, updates), state), ~jnp.stack(resolved)

    start = (parameters, optimizer.init(parameters))
    (end, state), unresolved = jax.jit(lambda: jax.lax.scan(step, start, length=steps))()
    return end, state, unresolved.sum(axis=0)


@pytest.mark.parametrize("solver", ["auto", cx.LSMR(rtol=1e-3)], ids=["auto", "LSMR"])
@pytest.mark.parametrize("rows", [bend, scale_rows])
def test_a_constraint_does_not_contradict_its_double(rows, solver):
    optimizer = cx.constrain(
        optax.adam(1e-2), (rows, lambda p: rows(p)), method=cx.NullSpace(solver=solver)
    )
    end, state, unresolved = run(optimizer, jnp.zeros(100), jnp.ones(100), steps=150)
    assert cx.contradictions(state) == []
    np.testing.assert_array_equal(unresolved, 0)
    np.testing.assert_allclose(bend(end), 0, atol=0.2 if rows is scale_rows else 1e-3)


@pytest.mark.parametrize("solver", ["auto", cx.LSMR(rtol=1e-3)], ids=["auto", "LSMR"])
def test_a_constraint_contradicts_its_opposite(solver):
    optimizer = cx.constrain(
        optax.adam(1e-2), (bend, lambda p: bend(p) + 0.1), method=cx.NullSpace(solver=solver)
    )
    _, state, _ = run(optimizer, jnp.zeros(100), jnp.ones(100), steps=150)
    (sentence,) = cx.contradictions(state)
    assert "contradict each other" in sentence


def orthogonal(p):
    return (p["w"].T @ p["w"] - jnp.eye(8))[jnp.triu_indices(8)]


def sum_to_one(p):
    return 1e-2 * (jnp.sum(p["v"]) - 1)


@pytest.mark.parametrize(
    "solver", ["auto", "gram", cx.LSMR(rtol=1e-3)], ids=["auto", "gram", "LSMR"]
)
def test_a_constraint_of_small_scale_is_met_beside_others(solver):
    optimizer = cx.constrain(
        optax.adam(1e-2), (orthogonal, sum_to_one), gamma=0.3, method=cx.NullSpace(solver=solver)
    )
    parameters = {"w": jax.random.normal(jax.random.key(0), (10, 8)), "v": jnp.linspace(-1, 1, 5)}
    goal = {"w": jax.random.normal(jax.random.key(1), (10, 8)), "v": jnp.full(5, 3.0)}
    end, _, unresolved = run(optimizer, parameters, goal, steps=300)
    np.testing.assert_array_equal(unresolved, 0)
    np.testing.assert_allclose(jnp.sum(end["v"]), 1, atol=1e-5)
    np.testing.assert_allclose(orthogonal(end), 0, atol=1e-5)


@jax.custom_jvp
def hide(p):
    """Zero, with a derivative that is not a number."""
    return jnp.zeros(3) * p[:3]


hide.defjvp(lambda primals, tangents: (hide(*primals), jnp.nan * tangents[0][:3]))


@pytest.mark.parametrize("solver", ["auto", cx.LSMR(), cx.CG()], ids=["auto", "LSMR", "CG"])
@pytest.mark.parametrize("kind", ["equality", "inequality"])
def test_a_row_whose_gradient_is_not_a_number_spoils_the_step(solver, kind):
    composed = cx.compose(lambda p: hide(p) + 1, bend)
    first = dataclasses.replace(composed.members[0], kind=kind)
    composed = dataclasses.replace(composed, members=(first, *composed.members[1:]))
    optimizer = cx.constrain(optax.sgd(1e-2), composed, method=cx.NullSpace(solver=solver))
    end, _, _ = run(optimizer, jnp.zeros(100), jnp.ones(100), steps=1)
    assert not np.all(np.isfinite(end))


@pytest.mark.parametrize("solver", ["gram", cx.LSMR()], ids=["gram", "LSMR"])
@pytest.mark.parametrize("gamma", [jnp.nan, jnp.inf, -0.1], ids=["nan", "inf", "negative"])
def test_a_schedule_of_gamma_that_leaves_its_range_spoils_the_step(gamma, solver):
    composed = cx.compose(bend, gamma=lambda step: jnp.where(step < 1, 0.5, gamma))
    optimizer = cx.constrain(optax.sgd(1e-2), composed, method=cx.NullSpace(solver=solver))
    end, _, _ = run(optimizer, jnp.zeros(100), jnp.ones(100), steps=1)
    assert np.all(np.isfinite(end))
    end, _, _ = run(optimizer, jnp.zeros(100), jnp.ones(100), steps=2)
    assert not np.all(np.isfinite(end))
