"""Reductions: those that are built in, and those that users write."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import constrainx as cx
from constrainx.constraints.reductions import flatten, slices_of

KEY = jax.random.key(0)
BATCH = {"x": jnp.linspace(-3, 3, 8)[:, None]}


class Odd(cx.Constraint):
    def residual(self, model, batch, *, key):
        return model(batch["x"]) + model(-batch["x"])


class Net(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(1, 8, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(8, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.last(nnx.silu(self.first(x)))


@dataclasses.dataclass(frozen=True)
class Moments:
    """Two rows that share the batch."""

    def __call__(self, residual, *, key):
        entries = flatten(residual)
        return jnp.stack([jnp.mean(entries), jnp.mean(entries**3)])


@dataclasses.dataclass(frozen=True)
class SumOfChunk:
    """One row for each chunk of examples."""

    size: int

    def slices(self, batch):
        return batch["x"].shape[0] // self.size

    def __call__(self, residual, *, key):
        return jnp.sum(flatten(residual))[None]


def sum_of_all(residual, *, key):
    return jnp.sum(flatten(residual))[None]


def residual_of(model):
    return np.asarray(Odd().residual(model, BATCH, key=KEY))[:, 0]


USERS = {
    "shared batch": (Moments(), lambda r: [r.mean(), (r**3).mean()]),
    "disjoint examples": (SumOfChunk(4), lambda r: r.reshape(2, 4).sum(axis=1)),
    "plain function": (sum_of_all, lambda r: [r.sum()]),
}


@pytest.mark.parametrize("case", USERS)
def test_a_reduction_written_by_a_user_makes_the_rows(case):
    reduce, expected = USERS[case]
    model = Net()
    composed = cx.compose(cx.attach(model, Odd(reduce=reduce, gamma=1.0)))
    params = nnx.state(model, nnx.Param)
    rows = composed(params, BATCH, KEY)["odd"]
    np.testing.assert_allclose(rows, expected(residual_of(model)), rtol=1e-5)


@pytest.mark.parametrize("case", USERS)
def test_a_step_removes_the_rows_of_a_users_reduction_to_first_order(case):
    model = Net()
    composed = cx.compose(Odd(reduce=USERS[case][0], gamma=1.0), model=model)
    params = nnx.state(model, nnx.Param)

    @jax.jit
    def step(params):
        update = jax.tree.map(jnp.ones_like, params)
        found = cx.project(update, composed, params, batch=BATCH, key=KEY)
        moved = jax.jvp(lambda p: composed(p, BATCH, KEY), (params,), (found.update,))[1]
        return found.rows["odd"], moved["odd"]

    rows, moved = step(params)
    np.testing.assert_allclose(moved, -rows, rtol=1e-3, atol=1e-5)


def test_slices_are_known_of_reductions_that_have_them():
    assert slices_of(Moments()) is None
    assert slices_of(sum_of_all) is None
    assert slices_of(cx.Sketch()) is None
    assert slices_of(SumOfChunk(2))(BATCH) == 4
    assert slices_of(cx.Norm(groups=4))(BATCH) == 4
    assert slices_of(cx.Norm())(BATCH) == 8


@dataclasses.dataclass
class Unhashable:
    def __call__(self, residual, *, key):
        return flatten(residual)


@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        (3, r"`Odd\(reduce=3\)` is not a reduction.*__call__\(self, residual, \*, key\)"),
        (lambda residual: residual, "is not a reduction"),
        (Moments, "got the class Moments: call it"),
        (Unhashable(), "frozen dataclass"),
    ],
)
def test_what_is_not_a_reduction_is_refused_when_the_constraint_is_built(reduce, message):
    with pytest.raises(TypeError, match=message):
        Odd(reduce=reduce)


@pytest.mark.parametrize(
    "batch", [None, {"x": jnp.zeros(())}, {"x": jnp.zeros((0, 1))}, [jnp.zeros(2), jnp.zeros(3)]]
)
def test_a_norm_needs_a_batch_of_examples(batch):
    with pytest.raises(ValueError, match="share their first axis"):
        cx.Norm().slices(batch)


def test_a_mean_over_a_single_number_is_refused():
    model = Net()
    norm = cx.UnitNorm(of=lambda m: m.last.kernel[...], reduce="mean")
    with pytest.raises(ValueError, match='Use `reduce="none"`'):
        cx.compose(norm, model=model)(nnx.state(model, nnx.Param))
