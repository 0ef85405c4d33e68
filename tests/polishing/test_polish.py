"""Polishing against dense solutions in float64, and what its certificate says."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

import constrainx as cx
from constrainx.constraints.reductions import flatten
from constrainx.runtime import Sharding

generator = np.random.default_rng(0)
POINTS = {"x": generator.uniform(0.2, 1, size=(6, 2))}
OTHERS = {"x": generator.uniform(0.2, 1, size=(5, 2))}


class Odd(cx.Constraint):
    def residual(self, model, batch, *, key):
        return model(-batch["x"]) + model(batch["x"])


class OneAtZero(cx.Constraint):
    def residual(self, model, batch, *, key):
        return 100 * (model(jnp.zeros((1, 2))) - 1)


class ZeroAtZero(cx.Constraint):
    def residual(self, model, batch, *, key):
        return model(jnp.zeros((1, 2)))


class Net(nnx.Module):
    def __init__(self, dtype):
        # Without biases it would be odd.
        settings = {
            "param_dtype": dtype,
            "bias_init": nnx.initializers.normal(0.5),
            "rngs": nnx.Rngs(0),
        }
        self.hidden = nnx.Linear(2, 12, **settings)
        self.last = nnx.Linear(12, 1, **settings)

    def __call__(self, x):
        return self.last(jnp.tanh(self.hidden(jnp.asarray(x))))


@pytest.fixture
def model(x64):
    return Net(jnp.float64)


def make_dense(model, function):
    """The value and the Jacobian of a function of a model, and its parameters, in one vector."""
    graph = nnx.graphdef(model)
    flat, unravel = ravel_pytree(nnx.as_pure(nnx.state(model, nnx.Param)))

    def call(vector):
        return flatten(function(nnx.merge(graph, unravel(vector))))

    return np.asarray(call(flat)), np.asarray(jax.jacfwd(call)(flat)), np.asarray(flat)


def ravel(model):
    return np.asarray(ravel_pytree(nnx.as_pure(nnx.state(model, nnx.Param)))[0])


@pytest.mark.parametrize("solver", [None, cx.LSMR(rtol=1e-14)], ids=["stored", "LSMR"])
def test_a_step_is_the_shortest_that_solves_the_linear_rows(model, solver):
    odd = Odd(reduce="norm", examples=2)  # which must not be what the rows are
    polished, found = cx.polish(
        model, odd, POINTS, tolerance=0.0, max_steps=1, solver=solver, batch=4
    )
    c, jacobian, start = make_dense(model, lambda m: m(-POINTS["x"]) + m(POINTS["x"]))
    expected = start - np.linalg.pinv(jacobian) @ c
    assert found.steps[0].length == 1
    assert found.ending == "steps"
    np.testing.assert_allclose(ravel(polished), expected, atol=1e-9)


def test_a_step_changes_outputs_to_be_kept_as_little_as_the_weight_says(model):
    weight = 3.0
    polished, found = cx.polish(
        model, Odd(), POINTS, keep=OTHERS, weight=weight, tolerance=0.0, max_steps=1
    )
    c, jacobian, start = make_dense(model, lambda m: m(-POINTS["x"]) + m(POINTS["x"]))
    _, kept, _ = make_dense(model, lambda m: m(OTHERS["x"]))
    kept = kept * weight / np.sqrt(np.mean(np.sum(kept**2, axis=1)))
    metric = np.eye(len(start)) + kept.T @ kept
    zeros = np.zeros((len(c), len(c)))
    optimality = np.block([[metric, jacobian.T], [jacobian, zeros]])
    right = np.concatenate([np.zeros(len(start)), -c])
    step = np.linalg.lstsq(optimality, right, rcond=1e-13)[0][: len(start)]
    np.testing.assert_allclose(ravel(polished), start + step, atol=1e-7)
    change = np.asarray(polished(OTHERS["x"]) - model(OTHERS["x"]))
    expected = np.linalg.norm(change) / np.linalg.norm(np.asarray(model(OTHERS["x"])))
    assert found.change == pytest.approx(expected, rel=1e-6)


def test_convergence_is_quadratic_where_training_used_norms(model):
    polished, found = cx.polish(model, Odd(reduce="norm"), POINTS, tolerance=0.0)
    assert found.ending == "rounding"
    assert found.met
    x = POINTS["x"]
    np.testing.assert_allclose(polished(-x), -polished(x), atol=1e-13)
    sizes = [step.size for step in found.steps]
    pairs = [(a, b) for a, b in itertools.pairwise(sizes) if 1e-7 < a < 0.1]
    assert pairs
    assert all(after < 20 * before**2 for before, after in pairs)


def test_the_certificate_says_what_holds_and_where(model):
    before = ravel(model)

    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - 1) ** 2)

    polished, found = cx.polish(
        model, [Odd(), ZeroAtZero(tolerance=1e-6)], POINTS, held_out=OTHERS, loss=loss, keep=POINTS
    )

    def measure(model, x):
        return np.sqrt(np.mean((model(x) + model(-x)) ** 2))

    assert found.met
    assert found.ending == "met"
    odd = found["odd"]
    np.testing.assert_array_equal(ravel(model), before)
    assert odd.before == pytest.approx(measure(model, POINTS["x"]))
    assert odd.after == pytest.approx(measure(polished, POINTS["x"]), abs=1e-12)
    assert odd.after < odd.tolerance < odd.before
    assert odd.held_out_before == pytest.approx(measure(model, OTHERS["x"]))
    assert odd.held_out_after == pytest.approx(measure(polished, OTHERS["x"]), rel=1e-6)
    assert odd.rows == 6
    assert found["zero-at-zero"].rows == 1
    expected = [float(loss(model, POINTS)), float(loss(polished, POINTS))]
    assert found.loss == pytest.approx(expected)
    text = str(found)
    assert "every constraint holds at the given points" in text
    assert max(map(len, text.splitlines())) <= 80


def test_contradictions_are_said_in_words(model):
    _, found = cx.polish(model, [OneAtZero(), ZeroAtZero()])
    assert not found.met
    assert found.ending == "contradiction"
    assert "contradict each other" in found.reason
    assert "one-at-zero, zero-at-zero" in found.reason
    # In rows of equal length, the best compromise is half way.
    assert found["zero-at-zero"].after == pytest.approx(0.5, abs=1e-3)


def test_rows_that_depend_on_each_other_are_met(model):
    twice = {"x": np.concatenate([POINTS["x"], POINTS["x"], -POINTS["x"]])}
    polished, found = cx.polish(model, Odd(), twice, tolerance=1e-10)
    once, _ = cx.polish(model, Odd(), POINTS, tolerance=1e-10)
    assert found.met
    np.testing.assert_allclose(ravel(polished), ravel(once), atol=1e-9)


def test_outputs_of_infinite_weight_do_not_change(model):
    polished, found = cx.polish(
        model, Odd(), {"x": POINTS["x"][:3]}, keep=OTHERS, weight=math.inf, tolerance=1e-9
    )
    assert found.met
    assert found.change < 1e-11
    np.testing.assert_allclose(polished(OTHERS["x"]), model(OTHERS["x"]), atol=1e-11)
    # All of a contradiction's rows are kept points here, and the reason says so.
    keep = {"x": np.concatenate([POINTS["x"][:1], -POINTS["x"][:1]])}
    _, found = cx.polish(model, Odd(), {"x": POINTS["x"][:1]}, keep=keep, weight=math.inf)
    assert found.ending == "contradiction"
    assert "the outputs that are to stay as they are contradict" in found.reason


def test_inequalities_that_hold_are_left_alone_unless_a_step_would_break_them(model):
    x = POINTS["x"]
    limit = float(jnp.median(model(x)))
    below = cx.AtMost(limit, of=lambda m, b, k: m(b["x"]), tolerance=1e-9, reduce="norm")
    polished, found = cx.polish(model, below, POINTS)
    assert found.met
    assert jnp.max(polished(x)) <= limit + 1e-8
    # The active rows of the quadratic program, by brute force over all sets of rows.
    c, jacobian, start = make_dense(model, lambda m: m(x) - limit)
    steps = []
    for number in range(1, 2 ** len(c)):
        active = [bool(number >> i & 1) for i in range(len(c))]
        step = -np.linalg.pinv(jacobian[active]) @ c[active]
        if np.all(c + jacobian @ step <= 1e-12):
            steps.append(step)
    shortest = min(np.linalg.norm(step) for step in steps)
    one, _ = cx.polish(model, below, POINTS, max_steps=1)
    assert np.linalg.norm(ravel(one) - start) == pytest.approx(shortest, rel=1e-9)


def test_only_what_may_move_does(model):
    last = nnx.PathContains("last")
    polished, found = cx.polish(model, Odd(wrt=last), POINTS, tolerance=1e-10)
    assert found.met
    np.testing.assert_array_equal(polished.hidden.kernel[...], model.hidden.kernel[...])
    np.testing.assert_array_equal(polished.hidden.bias[...], model.hidden.bias[...])
    assert not np.array_equal(polished.last.bias[...], model.last.bias[...])
    with pytest.raises(cx.UserError, match="differ in `wrt`"):
        cx.polish(model, [Odd(wrt=last), ZeroAtZero()], POINTS)


def test_rows_that_nothing_moves_are_named(model):
    class Far(cx.Constraint):
        def residual(self, model, batch, *, key):
            return jnp.ones(1)

    _, found = cx.polish(model, Far())
    assert not found.met
    assert found.reason.startswith("far: no parameter that may move changes its rows")


def test_what_is_not_finite_is_left_as_it_is(model):
    broken = {"x": np.array([[0.1, np.nan]])}
    polished, found = cx.polish(model, Odd(), broken)
    assert not found.met
    assert found.ending == "not finite"
    np.testing.assert_array_equal(ravel(polished), ravel(model))


def test_a_loss_that_must_not_rise_stops_it(model):
    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - target) ** 2)

    target = model(POINTS["x"])
    _, found = cx.polish(model, Odd(), POINTS, loss=loss, most_loss=1e-9)
    assert found.ending == "loss"
    assert found.loss[1] <= 1e-9
    assert "`most_loss`" in found.reason


def test_float32_ends_at_rounding_and_says_so():
    model = Net(jnp.float32)
    points = {"x": POINTS["x"].astype(np.float32)}
    _, found = cx.polish(model, Odd(), points, tolerance=1e-12)
    assert not found.met
    assert found.ending == "rounding"
    assert "in float64 more is possible" in found.reason
    assert found["odd"].after < 1e-6


def test_points_that_are_drawn_stay_the_same():
    class AtRandom(cx.Constraint):
        def residual(self, model, batch, *, key):
            x = jax.random.uniform(key, (3, 2))
            return model(-x) + model(x)

    model = Net(jnp.float32)
    _, found = cx.polish(model, AtRandom(reduce=cx.Sketch(rows=2)), draws=2, tolerance=0.0)
    assert found.met
    assert found["at-random"].rows == 6
    assert found["at-random"].after < 1e-6


def test_a_nearest_point_that_is_known_is_taken():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    class Symmetric(cx.Constraint):
        def residual(self, model, batch, *, key):
            return model.kernel[...] - model.kernel[...].T

        def nearest(self, model):
            model.kernel.set_value((model.kernel[...] + model.kernel[...].T) / 2)

    polished, found = cx.polish(model, Symmetric(wrt=nnx.PathContains("kernel")))
    assert found.met
    assert found.steps == ()
    kernel = model.kernel[...]
    np.testing.assert_array_equal(polished.kernel[...], (kernel + kernel.T) / 2)
    # With outputs to be kept it has rows, and the nearest point is another one.
    keep = {"x": np.eye(4, dtype=np.float32)[:1]}
    _, found = cx.polish(model, Symmetric(), keep=keep, tolerance=1e-5)
    assert found.met
    assert found["symmetric"].rows == 16


def test_eight_devices_polish_as_one_does(x64, model):
    class Normalised(nnx.Module):
        def __init__(self, inner):
            self.inner = inner
            self.norm = nnx.BatchNorm(1, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(self.inner(x))

    model = Normalised(model)
    # Far apart, so that the rows do not nearly depend on each other.
    points = {"x": generator.normal(size=(10, 2)) * 2}
    solver = cx.LSMR(rtol=1e-13, max_iterations=1000)
    options = {"batch": 8, "tolerance": 1e-8, "solver": solver}
    alone, one = cx.polish(model, Odd(), points, **options)
    sharding = Sharding.over(devices=8, fsdp=2)
    graph, rngs, state = nnx.split(model, nnx.RngState, ...)
    placed = nnx.merge(graph, rngs, sharding.place(state), copy=True)
    spread, many = cx.polish(placed, Odd(), points, **options)
    assert one.met
    assert many.met
    # Steps end where violations are 1e-8, divided by the smallest singular value of the rows.
    np.testing.assert_allclose(ravel(spread), ravel(alone), atol=2e-6)
    assert float(jnp.abs(ravel(alone) - ravel(model)).max()) > 0.01
    leaves = jax.tree.leaves(nnx.state(spread, nnx.Param))
    assert all(leaf.sharding.mesh.size == 8 for leaf in leaves)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": -1.0}, r"polish\(tolerance=...\)"),
        ({"max_steps": 0}, r"polish\(max_steps=...\)"),
        ({"most_loss": 1.0}, "needs the loss that it limits"),
        ({"data": np.ones(3)}, "must be batches"),
        ({"keep": {"y": np.ones((3, 2))}}, "`of=lambda model, batch: ...`"),
        ({"data": cx.data.from_function(lambda rng, n: {"x": np.ones((n, 2))}, batch=2)}, "no end"),
    ],
)
def test_arguments_that_cannot_work_are_refused(options, message):
    model = Net(jnp.float32)
    with pytest.raises(cx.UserError, match=message):
        cx.polish(model, Odd(), **{"data": {"x": np.ones((2, 2), np.float32)}, **options})
