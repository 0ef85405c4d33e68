"""A constraint that does not act at a step is not evaluated, unless its violation is wanted."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
# How often each constraint's residual was evaluated, by name.
EVALUATED: collections.Counter[str] = collections.Counter()


@dataclasses.dataclass(frozen=True)
class Even(cx.Constraint):
    def residual(self, model, batch, *, key):
        jax.debug.callback(lambda name=self.name: EVALUATED.update([name]))
        return model(batch["x"]) - model(-batch["x"])


METHODS = {
    "gram": cx.NullSpace(solver="gram"),
    "twice": cx.NullSpace(placement="twice", solver="gram"),
    "iterative": cx.NullSpace(solver=cx.LSMR(rtol=1e-6)),
    "penalty": cx.Penalty(),
    "lagrangian": cx.Lagrangian(),
}


def prepare(method, *constraints):
    """A compiled step of a small network that takes the state, its number and `measure`."""
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = cx.constrain(optax.sgd(0.1), constraints, model=model, method=method)
    graph, parameters = nnx.split(model, nnx.Param)

    @jax.jit
    def step(parameters, state, measure):
        gradients = jax.grad(lambda p: jnp.mean(nnx.merge(graph, p)(X) ** 2))(parameters)
        batch = {"x": X}
        module = nnx.merge(graph, parameters)
        update, state = optimizer.update(
            gradients, state, parameters, batch=batch, module=module, measure=measure
        )
        return optax.apply_updates(parameters, update), state

    return step, parameters, optimizer.init(parameters)


@pytest.mark.parametrize("name", METHODS)
def test_constraints_are_evaluated_only_where_they_act_or_are_measured(name):
    often, seldom = Even(name="often", every=2), Even(name="seldom", start=1, every=3)
    step, parameters, state = prepare(METHODS[name], often, seldom)
    last = {"often": np.nan, "seldom": np.nan}
    for number in range(6):
        measure = number == 3
        EVALUATED.clear()
        kernel = np.asarray(parameters["kernel"][...])
        parameters, state = step(parameters, state, measure)
        jax.effects_barrier()
        reports = cx.reports(state)
        acts = {"often": number % 2 == 0, "seldom": number in (1, 4)}
        now = 2 * np.asarray(X) @ kernel
        for constraint in ("often", "seldom"):
            assert (EVALUATED[constraint] > 0) == (acts[constraint] or measure)
            assert bool(reports[constraint].active) == acts[constraint]
            if acts[constraint] or measure:
                last[constraint] = np.sqrt(np.mean(now**2))
            found = reports[constraint].violation
            np.testing.assert_allclose(found, last[constraint], rtol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_a_constraint_that_rests_leaves_the_step_of_the_others_as_it_is(name):
    both, first, start = prepare(METHODS[name], Even(name="acts"), Even(name="rests", start=9))
    alone, second, alone_start = prepare(METHODS[name], Even(name="acts"))
    for _ in range(2):
        first, start = both(first, start, False)
        second, alone_start = alone(second, alone_start, False)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Zero(cx.Constraint):
    """A constraint that knows its nearest point, and is corrected without rows."""

    def residual(self, model, batch, *, key):
        return model.kernel[...]

    def nearest(self, model):
        model.kernel.set_value(jnp.zeros_like(model.kernel[...]))


def test_a_constraint_with_a_closed_form_rests_as_well():
    step, parameters, state = prepare(cx.NullSpace(), Zero(start=1, every=3, gamma=0.5))
    last = np.nan
    for number in range(5):
        kernel, bias = (np.asarray(parameters[name][...]) for name in ("kernel", "bias"))
        plain = np.asarray(X).T @ (X @ kernel + bias) / 4  # of the mean over 4 × 2 squares
        parameters, state = step(parameters, state, False)
        acts = number in (1, 4)
        wanted = 0.5 * kernel if acts else kernel - 0.1 * plain
        np.testing.assert_allclose(parameters["kernel"][...], wanted, rtol=1e-5, atol=1e-7)
        last = np.sqrt(np.mean(kernel**2)) if acts else last
        report = cx.reports(state)["zero"]
        np.testing.assert_allclose(report.violation, last, rtol=1e-5)
        assert bool(report.active) == acts
