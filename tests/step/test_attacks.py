"""Numbers that would be wrong without a word: steps and reports against plain references."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx.constraints import Composed, Member, find_live_inputs

_rng = np.random.default_rng(0)
MATRIX = jnp.asarray(_rng.normal(size=(6, 8)), jnp.float32)
BOUND = jnp.asarray(0.3 * _rng.normal(size=6), jnp.float32)
UPDATE = jnp.asarray(_rng.normal(size=8), jnp.float32)


def as_inequality(function, **settings):
    def rows(p, batch, key, model):
        return function(p)

    return Composed((Member("at-most", rows, 1.0, kind="inequality", **settings),))


@pytest.mark.parametrize("every", [1, 2])
def test_iterations_find_the_same_active_inequalities_inside_of_jit(every):
    at_most = as_inequality(lambda p: MATRIX @ p - BOUND, every=every)

    def step(update, solver):
        return cx.project(update, at_most, jnp.zeros(8), solver=solver).update

    exact = step(UPDATE, "gram")
    np.testing.assert_allclose(step(UPDATE, cx.LSMR(rtol=1e-6)), exact, atol=1e-4)
    compiled = jax.jit(lambda update: step(update, cx.LSMR(rtol=1e-6)))(UPDATE)
    np.testing.assert_allclose(compiled, exact, atol=1e-4)


def test_room_of_some_inequalities_does_not_hide_the_contradiction_of_others():
    contradict = as_inequality(lambda p: jnp.stack([p[0] - 100.0, p[1] + 0.5, 0.5 - p[1]]))
    step = cx.project(jnp.zeros(2), contradict, jnp.zeros(2))
    assert not step.reports["at-most"].resolved
    feasible = as_inequality(lambda p: jnp.stack([p[0] - 100.0, p[1] + 0.5, -2.0 - p[1]]))
    step = cx.project(jnp.zeros(2), feasible, jnp.zeros(2))
    assert step.reports["at-most"].resolved


def test_rows_that_are_nearly_the_same_do_not_outweigh_another_constraint():
    """The lengths of rows are estimated at random, which must be right for every draw."""
    start = jnp.cos(7 * jnp.arange(64.0))
    matrix = jnp.sin(jnp.arange(256.0) ** 2).reshape(4, 64)

    def same(p):
        return jnp.sum(jnp.sin(p * jnp.linspace(1, 2, 64))) + 1e-5 * jnp.arange(10) * p[:10]

    def other(p):
        return matrix @ p - 1

    composed = cx.compose(same, other, gamma=0.5)

    @jax.jit
    def miss(key):
        update = cx.project(jnp.sin(5 * start), composed, start, key=key).update
        _, moved = jax.jvp(other, (start,), (update,))
        asked = 0.5 * other(start)
        return jnp.linalg.norm(moved + asked) / jnp.linalg.norm(asked)

    missed = [float(miss(jax.random.key(seed))) for seed in range(20)]
    assert max(missed) < 0.1


def test_reports_of_one_name_in_several_transformations_are_all_there():
    optimizer = optax.chain(
        cx.nullspace(lambda p: p[0] - 1.0), cx.constrain(optax.sgd(0.1), lambda p: p[1] - 2.0)
    )
    p = jnp.zeros(2)
    _, state = optimizer.update(p, optimizer.init(p), p)
    found = {name: float(report.violation) for name, report in cx.reports(state).items()}
    assert found == {"constraint": 1.0, "constraint-2": 2.0}


class TwoParts(nnx.Module):
    def __init__(self):
        self.first = nnx.Param(jnp.array([0.5, -1.0, 2.0]))
        self.second = nnx.Param(jnp.array([1.0, 0.3, -0.7]))


@dataclasses.dataclass(frozen=True)
class Weighted(cx.Constraint):
    weights: tuple[float, ...]

    def residual(self, model, batch, *, key):
        values = jnp.concatenate([model.first[...], model.second[...]])
        return jnp.asarray(self.weights) @ values - 0.3


@pytest.mark.parametrize("placement", ["gradient", "twice"])
def test_a_gradient_obeys_constraints_that_may_move_different_parameters(placement):
    """The nearest gradient with J P g = γ c goes in, or with J P g = 0 if it is projected twice."""
    model = TwoParts()
    some = Weighted(
        weights=(1.0, -2.0, 0.5, 3.0, 1.0, -1.0),
        wrt=nnx.All(nnx.Param, nnx.PathContains("first")),
        name="some",
        placement=placement,
        gamma=0.5,
    )
    every = Weighted(
        weights=(0.3, 1.0, 2.0, -1.0, 0.7, 1.5), name="every", placement=placement, gamma=0.5
    )
    seen = []

    def note(updates, state, params=None):
        seen.append(np.concatenate(jax.tree.leaves(updates)))
        return jax.tree.map(jnp.negative, updates), state

    recorder = optax.GradientTransformation(lambda params: (), note)
    optimizer = cx.constrain(recorder, (some, every), model=model)
    params = nnx.state(model, nnx.Param)
    gradient = jax.tree.map(jnp.cos, params)
    optimizer.update(gradient, optimizer.init(params), params)

    moving = np.array([some.weights, every.weights])
    moving[0, 3:] = 0
    rows = np.array([constraint.residual(model, None, key=None) for constraint in (some, every)])
    pull = 0.5 * rows if placement == "gradient" else np.zeros(2)
    before = np.concatenate(jax.tree.leaves(gradient))
    exact = before - np.linalg.pinv(moving) @ (moving @ before - pull)
    np.testing.assert_allclose(seen[-1], exact, atol=1e-5)


def _stop_after_three(p, batch, key):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + c[0], c[2]), (
        p[0], p[1], key,
    ))[1]  # fmt: skip


def _add_in_turn(p, first, second):
    """Each round reads what the round before has carried on from the next one."""
    start = (p, jnp.zeros(3), first)
    return jax.lax.scan(lambda c, x: ((c[0] + c[1], c[1] + c[2], c[2]), None), start, second)[0][0]


@jax.custom_jvp
def _pretend(p, batch):
    return 2 * p


_pretend.defjvp(lambda primals, tangents: (2 * primals[0], primals[1] * tangents[0]))


@pytest.mark.parametrize(
    ("function", "live"),
    [
        (jax.checkpoint(lambda p, batch, key: 2 * p), (False, False)),
        (jax.checkpoint(lambda p, batch, key: batch * p), (True, False)),
        (lambda p, batch, key: jax.lax.cond(p[0] > 0, lambda p, b, k: p, lambda p, b, k: 2 * p,
                                            p, batch, key), (False, False)),
        (lambda p, batch, key: jax.lax.cond(p[0] > 0, lambda p, b, k: p, lambda p, b, k: b * p,
                                            p, batch, key), (True, False)),
        (lambda p, batch, key: jax.lax.cond(batch[0] > 0, lambda p: p, lambda p: 2 * p, p),
         (True, False)),
        (lambda p, batch, key: jax.lax.scan(lambda c, x: ((2 * c[0], c[1]), x), (p, key),
                                            batch)[0][0], (False, False)),
        (lambda p, batch, key: jax.lax.scan(lambda c, x: (c * x, c), p, batch)[1], (True, False)),
        (lambda p, batch, key: _add_in_turn(p, batch, None if key is None else jnp.ones(2)),
         (True, False)),
        (_stop_after_three, (False, False)),
        (lambda p, batch, key: jax.lax.while_loop(lambda c: c[1] < batch[0], lambda c: (2 * c[0],
                                                  c[1] + 1), (p, 0.0))[0], (True, False)),
        (lambda p, batch, key: jax.lax.fori_loop(0, 3, lambda i, c: c * batch, p), (True, False)),
        (lambda p, batch, key: _pretend(p, batch), (True, False)),
        (lambda p, batch, key: p * jax.lax.stop_gradient(batch), (True, False)),
        (lambda p, batch, key: p * batch.size, (False, False)),
        (lambda p, batch, key: p + jax.random.normal(key, (3,)), (False, True)),
    ],
)  # fmt: skip
def test_live_inputs_are_found_inside_of_control_flow(function, live):
    closed = jax.make_jaxpr(function)(jnp.ones(3), jnp.ones(3), jax.random.key(0))
    assert find_live_inputs(closed)[1:] == live


def test_rows_of_the_parameters_alone_are_met_through_a_model_with_recomputed_dropout():
    """The random streams go into the block that is recomputed, but nothing is drawn from them."""

    class Net(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return nnx.remat(lambda net, x: net.dropout(jnp.tanh(net.layer(x))))(self, x)

    class AtOrigin(cx.Constraint):
        def residual(self, model, batch, *, key):
            return jnp.sum(model(jnp.ones((1, 2)))) - 0.3

    model, constraint = Net(), AtOrigin(gamma=0.5)
    optimizer = cx.constrain(optax.adam(0.1), constraint, model=model)
    params = nnx.state(model, nnx.Param)
    gradient = jax.tree.map(lambda leaf: jnp.cos(3 * leaf), params)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    rows = cx.compose(constraint, model=model)
    c, moved = jax.jvp(lambda p: rows(p)["at-origin"], (params,), (updates,))
    np.testing.assert_allclose(moved, -0.5 * c, atol=1e-5)


def _train_two_steps(rate):
    """The sum of parameters that have met bounds on the way, as a function of the learning rate."""
    at_most = as_inequality(lambda p: jnp.stack([jnp.sum(p**2) - 1, p[0] - 0.1, p[1] + p[2] - 0.2]))
    optimizer = cx.constrain(optax.sgd(rate, momentum=0.9), at_most)
    p = jnp.array([0.13, -0.13, 0.64, 0.1])
    state = optimizer.init(p)
    for _ in range(2):
        gradient = 2 * jnp.arange(1.0, 5.0) * (p - jnp.array([1.0, -2.0, 0.5, 1.5]))
        updates, state = optimizer.update(gradient, state, p)
        p += updates
    return jnp.sum(jnp.sin(p) * jnp.arange(4.0))


def test_the_derivative_with_respect_to_the_learning_rate_holds_beside_inequalities(x64):
    """How much of a gradient inequalities leave depends on how far the step will go."""
    run, rate, change = jax.jit(_train_two_steps), 0.03, 1e-6
    slope = (run(rate + change) - run(rate - change)) / (2 * change)
    np.testing.assert_allclose(jax.jit(jax.grad(_train_two_steps))(rate), slope, rtol=1e-5)


def test_a_step_with_inequalities_can_be_differentiated_at_a_gradient_of_zero():
    optimizer = cx.constrain(optax.sgd(0.1), as_inequality(lambda p: p[:2] - 0.1))

    def step(p):
        return jnp.sum(optimizer.update(jnp.zeros(4), optimizer.init(p), p)[0])

    # The second row is violated by 0.3, all of which the step removes.
    slope = jax.jit(jax.grad(step))(jnp.array([-0.5, 0.4, 0.0, 0.0]))
    np.testing.assert_allclose(slope, [0, -1, 0, 0], atol=1e-6)
