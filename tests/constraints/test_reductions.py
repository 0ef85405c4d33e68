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


def test_slices_of_is_none_for_reductions_that_share_the_batch():
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
def test_objects_that_are_not_reductions_are_refused_when_the_constraint_is_built(reduce, message):
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


BUILT_IN = ["none", "norm", "mean", "rms", cx.Norm(groups=2), cx.Sketch(rows=3)]


class Output(cx.Constraint):
    def residual(self, model, batch, *, key):
        return model * batch["x"]


def rows_of(constraint, batch, scale=1.0):
    """The rows for a batch, and their derivative with respect to a factor of it."""
    reduction = constraint.reduction
    slices = slices_of(reduction)

    def rows(scale):
        if slices is None:
            return reduction(constraint.residual(scale, batch, key=KEY), key=KEY)
        pieces = batch["x"].reshape(slices(batch), -1, 1)
        one = jax.vmap(lambda x: reduction(constraint.residual(scale, {"x": x}, key=KEY), key=KEY))
        return one(pieces)[:, 0]

    return jax.jvp(rows, (jnp.float32(scale),), (jnp.float32(1),))


@pytest.mark.parametrize("reduce", BUILT_IN, ids=str)
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_nan_and_infinity_in_a_residual_reach_its_rows(reduce, bad):
    rows, _ = rows_of(Output(reduce=reduce), {"x": jnp.full((4, 1), bad)})
    if jnp.isnan(bad):
        assert np.all(np.isnan(rows))
    else:
        assert not np.any(np.isfinite(rows))
    if reduce in ("norm", "mean", "rms", "none"):
        np.testing.assert_array_equal(rows, np.full(rows.shape, bad))


@pytest.mark.parametrize("reduce", ["norm", "rms", cx.Norm(groups=2)], ids=str)
def test_norms_have_no_slope_at_zero(reduce):
    rows, slope = rows_of(Output(reduce=reduce), {"x": jnp.ones((4, 1))}, scale=0.0)
    np.testing.assert_array_equal(rows, 0)
    np.testing.assert_array_equal(slope, 0)


def test_a_violation_that_is_not_a_number_is_never_met():
    batch = {"x": jnp.full((4, 1), jnp.nan)}
    model = Net()
    composed = cx.compose(Odd(reduce="rms"), model=model)
    params = nnx.state(model, nnx.Param)
    update = jax.tree.map(jnp.zeros_like, params)
    project = jax.jit(lambda p: cx.project(update, composed, p, batch=batch, key=KEY))
    report = project(params).reports["odd"]
    assert np.isnan(report.violation)
    assert not report.met
    assert np.isnan(Odd().violation(model, batch, KEY))


@dataclasses.dataclass(frozen=True)
class Returning(cx.Constraint):
    value: object = dataclasses.field(default=None, hash=False, compare=False)

    def residual(self, model, batch, *, key):
        return self.value


@pytest.mark.parametrize("reduce", ["none", "norm", "mean", "rms", cx.Sketch(rows=2)], ids=str)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (jnp.arange(8), "'broken' is int32"),
        ({"a": jnp.ones(8), "b": jnp.arange(8) > 3}, r"'broken' is bool at \['b'\]"),
        (jnp.ones(8) * 1j, "'broken' is complex64.*real and imaginary parts"),
        (jnp.ones((8, 0)), r"'broken' has no entries"),
        ([], "'broken' has no entries"),
        (None, "'broken' has no entries"),
        ("zero", "'broken' is a str"),
    ],
)
def test_residuals_without_derivatives_or_rows_are_refused_by_name(value, message, reduce):
    model = Net()
    constraint = Returning(name="broken", value=value, reduce=reduce)
    composed = cx.compose(constraint, model=model)
    with pytest.raises((TypeError, ValueError), match=message):
        composed(nnx.state(model, nnx.Param), BATCH, KEY)
    with pytest.raises((TypeError, ValueError), match=message):
        constraint.violation(model, BATCH, KEY)


def test_flatten_takes_any_floating_arrays():
    entries = flatten(
        {"a": jnp.ones(2, jnp.bfloat16), "b": [2.0, np.full((1, 2), 3.0, np.float16)]}
    )
    assert entries.dtype == jnp.float32
    assert entries.tolist() == [1, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        (lambda residual, *, key: jnp.sum(residual), r"vector of rows, got shape \(\)"),
        (lambda residual, *, key: residual, r"vector of rows, got shape \(8, 1\)"),
        (lambda residual, *, key: flatten(residual) > 0, "and bool"),
        (lambda residual, *, key: flatten(residual)[:0], r"got shape \(0,\)"),
    ],
)
def test_a_reduction_that_does_not_return_rows_is_refused_by_name(reduce, message):
    model = Net()
    with pytest.raises(ValueError, match=rf"reduction of 'odd'.*{message}"):
        cx.compose(Odd(reduce=reduce), model=model)(nnx.state(model, nnx.Param), BATCH, KEY)


def test_a_reduction_with_slices_makes_one_row_of_each():
    @dataclasses.dataclass(frozen=True)
    class Several(SumOfChunk):
        def __call__(self, residual, *, key):
            return flatten(residual)

    model = Net()
    with pytest.raises(ValueError, match=r"one row of each slice, got 4"):
        cx.compose(Odd(reduce=Several(4)), model=model)(nnx.state(model, nnx.Param), BATCH, KEY)
