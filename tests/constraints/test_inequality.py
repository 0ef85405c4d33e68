"""Inequalities g ≤ bound under every reduction: feasible points are left alone."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx.constraints.reductions import Clipped, flatten

KEY = jax.random.key(0)
BATCH = {"x": jnp.array([1.0, 2.0, -3.0, 0.5])}
REDUCTIONS = ["none", "norm", "mean", "rms", cx.Norm(groups=2)]


class Slope(nnx.Module):
    """y = a x."""

    def __init__(self, a):
        self.a = nnx.Param(jnp.asarray(a))

    def __call__(self, x):
        return self.a * x


def outputs(model, batch, key):
    return model(batch["x"])


class BelowFour(cx.Constraint):
    """An inequality that a user wrote."""

    kind: ClassVar = "inequality"

    def residual(self, model, batch, *, key):
        return model(batch["x"]) - 4.0


def take_step(constraint, model, update=0.0):
    composed = cx.compose(constraint, model=model)
    params = nnx.state(model, nnx.Param)
    updates = jax.tree.map(lambda leaf: jnp.full_like(leaf, update), params)
    # Compiled, since operation by operation it takes seconds.
    project = jax.jit(lambda u, p: cx.project(u, composed, p, batch=BATCH, key=KEY))
    step = project(updates, params)
    return next(iter(step.rows.values())), float(step.update["a"][...])


@pytest.mark.parametrize("make", [lambda **k: cx.AtMost(4.0, of=outputs, **k), BelowFour])
@pytest.mark.parametrize("reduce", REDUCTIONS, ids=str)
def test_a_feasible_point_has_rows_of_at_most_zero_and_stays(reduce, make):
    """The outputs are [1, 2, −3, 0.5], all below 4."""
    constraint, model = make(reduce=reduce), Slope(1.0)
    for update in (0.0, 0.25):
        rows, moved = take_step(constraint, model, update)
        assert np.all(np.asarray(rows) <= 0)
        assert moved == update
    assert constraint.violation(model, BATCH, KEY) == 0


@pytest.mark.parametrize("reduce", REDUCTIONS, ids=str)
def test_an_infeasible_point_is_brought_back_to_the_bound(reduce):
    """At a = 4 the outputs are [4, 8, −12, 2]; the second must be at most 4."""
    bound = {"mean": -3.0}.get(reduce, 4.0)
    constraint = cx.AtMost(bound, of=outputs, reduce=reduce, placement="twice")
    model = Slope(4.0 if reduce != "mean" else 1.0)
    optimizer = cx.constrain(optax.sgd(0.1), constraint, model=model)
    params = nnx.state(model, nnx.Param)
    nothing = jax.tree.map(jnp.zeros_like, params)
    update = jax.jit(lambda state, params: optimizer.update(nothing, state, params, batch=BATCH))
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = update(state, params)
        params = optax.apply_updates(params, updates)
    nnx.update(model, params)
    reached = model(BATCH["x"])
    if reduce == "mean":
        # Only the mean is bounded, 0.125 a ≤ −3; the largest output is not.
        np.testing.assert_allclose(jnp.mean(reached), -3.0, rtol=1e-5)
    else:
        np.testing.assert_allclose(jnp.max(reached), 4.0, rtol=1e-5)


@pytest.mark.parametrize("reduce", ["norm", "rms"])
def test_norms_are_those_of_the_excess(reduce):
    """At a = 4 the outputs exceed 2 by [2, 6, 0, 0]."""
    rows, _ = take_step(cx.AtMost(2.0, of=outputs, reduce=reduce), Slope(4.0))
    np.testing.assert_allclose(rows, {"norm": [2, 6, 0, 0], "rms": [np.sqrt(10)]}[reduce])


def test_random_signs_are_refused_when_the_constraint_is_built():
    for make in (lambda **k: cx.AtMost(4.0, of=outputs, **k), BelowFour):
        with pytest.raises(ValueError, match=r"reduce=Sketch\(rows=4\)\)` .*inequality.*'norm'"):
            make(reduce=cx.Sketch(rows=4))


@dataclasses.dataclass(frozen=True)
class SumOfSquares:
    def __call__(self, residual, *, key):
        return jnp.sum(flatten(residual) ** 2)[None]


@dataclasses.dataclass(frozen=True)
class SumOfSquaredExcess(SumOfSquares):
    def for_inequality(self):
        return Clipped(self)


def test_a_users_reduction_says_how_it_reduces_inequalities():
    with pytest.raises(ValueError, match="method `for_inequality"):
        BelowFour(reduce=SumOfSquares())
    rows, moved = take_step(BelowFour(reduce=SumOfSquaredExcess()), Slope(1.0), 0.25)
    assert (rows.tolist(), moved) == ([0.0], 0.25)
    rows, _ = take_step(BelowFour(reduce=SumOfSquaredExcess()), Slope(3.0))
    assert rows.tolist() == [4.0]


@pytest.mark.parametrize("bound", [float("nan"), float("inf"), "one", jnp.ones(2)])
def test_the_bound_is_a_finite_number(bound):
    with pytest.raises(ValueError, match=r"`AtMost\(bound=...\)` must be a finite number"):
        cx.AtMost(bound, of=outputs)
