"""`Feasible` as a module: built, trained, saved, exported, and honest where it fails."""

import re
import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx.models import MLP

SHARES = cx.OutputEquals(1.0, of=lambda x, y: jnp.sum(y), name="shares")
POSITIVE = cx.OutputAtMost(0.0, of=lambda x, y: -y, name="positive")
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 2)), jnp.float32)


def make_model(seed=0):
    return cx.Feasible(MLP((2, 8, 3), rngs=nnx.Rngs(seed)), [POSITIVE, SHARES])


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "compiled"])
def test_every_output_satisfies_the_constraints(wrap):
    y = wrap(make_model())(10 * X)
    np.testing.assert_allclose(y.sum(axis=1), 1, atol=1e-5)
    assert y.min() >= -1e-5
    assert (y < 1e-5).any()


def test_outputs_that_satisfy_the_constraints_stay():
    model = cx.Feasible(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), [SHARES, POSITIVE])
    model.model.kernel[...], model.model.bias[...] = jnp.eye(3), jnp.zeros(3)
    x = np.random.default_rng(1).dirichlet(np.ones(3), size=8).astype(np.float32)
    found = model.check(x)
    np.testing.assert_allclose(found.output, x, atol=1e-6)
    np.testing.assert_allclose(found.moved, 0, atol=1e-6)


def test_an_output_may_be_a_tree():
    class Pair(nnx.Module):
        def __call__(self, x):
            return {"flow": x, "loss": 0.1 * x[:, :1]}

    kept = cx.OutputEquals(0.0, of=lambda x, y: jnp.sum(y["flow"]) - y["loss"])
    y = cx.Feasible(Pair(), kept)(X)
    assert y["flow"].shape == (16, 2)
    np.testing.assert_allclose(y["flow"].sum(axis=1), y["loss"][:, 0], atol=1e-5)


def test_outputs_in_bfloat16_are_not_rounded_again():
    class Half(nnx.Module):
        def __call__(self, x):
            return x.astype(jnp.bfloat16)

    y = cx.Feasible(Half(), SHARES)(X)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y.sum(axis=1), 1, atol=1e-5)


def test_what_cannot_be_met_is_reported_for_each_example():
    """y ≤ x and y ≥ 0 contradict each other where x is negative."""
    below = cx.OutputAtMost(0.0, of=lambda x, y: y - x, name="below")
    model = cx.Feasible(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), [below, POSITIVE])
    x = jnp.array([[1.0, 2.0], [-1.0, 1.0], [3.0, 0.5], [-2.0, -4.0]])
    found = model.check(x)
    np.testing.assert_array_equal(found.met, [True, False, True, False])
    left = np.maximum(found.violations["below"], found.violations["positive"])
    assert left[0] < 1e-5
    assert left[1] >= 0.49
    assert np.isfinite(found.output).all()
    text = "2 of 4 outputs satisfy the constraints; the first that does not is 1; "
    with pytest.warns(cx.UnmetWarning, match=text):
        model(x)


def test_equalities_without_a_solution_are_reported():
    """The least-squares compromise between 1 and 2."""
    both = cx.OutputEquals(0.0, of=lambda x, y: y[0] - jnp.array([1.0, 2.0]))
    found = cx.Feasible(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), both).check(X)
    assert not found.met.any()
    np.testing.assert_allclose(found.output[:, 0], 1.5, atol=1e-2)
    np.testing.assert_allclose(found.violations["output-equals"], 0.5, atol=1e-2)


def test_a_curved_set_that_is_empty_is_reported():
    nowhere = cx.OutputEquals(-1.0, of=lambda x, y: jnp.sum(y**2))
    found = cx.Feasible(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nowhere).check(X)
    assert not found.met.any()
    assert (found.violations["output-equals"] >= 1).all()


def test_an_input_that_is_not_finite_is_not_met():
    found = make_model().check(X.at[3].set(jnp.nan))
    np.testing.assert_array_equal(found.met, np.arange(16) != 3)


def test_the_trainer_trains_through_it_and_a_run_gives_it_back(tmp_path):
    """With a target that breaks the constraints, the best output is its projection."""
    target = jnp.array([0.9, 0.7, -0.5])

    def measure(model, batch):
        found = model.check(batch["x"])
        # Without the second term, outputs in a corner would stay there.
        return jnp.mean((found.output - target) ** 2) + 1e-2 * jnp.mean(found.moved**2)

    def train(run):
        return cx.Trainer(
            model=make_model(),
            loss=measure,
            optimizer=optax.adam(1e-2),
            data=cx.data.arrays({"x": np.asarray(X)}, batch=16),
            steps=150,
            run=cx.RunFolder(run),
            logging=cx.Logging(progress=False),
        )

    trained = train(tmp_path).fit().model
    y = trained(X)
    np.testing.assert_allclose(y, np.broadcast_to([0.6, 0.4, 0.0], y.shape), atol=0.02)
    loaded = cx.load(tmp_path, make_model(seed=1))
    np.testing.assert_array_equal(loaded(X), y)


def test_it_is_exported_with_the_model():
    """As StableHLO, which has the projection in it and needs no constrainx to run."""
    model = make_model()
    exported = jax.export.export(jax.jit(lambda x: model(x)))(jax.ShapeDtypeStruct((16, 2), "f4"))
    np.testing.assert_allclose(exported.call(10 * X), model(10 * X), atol=1e-6)


def test_one_declaration_serves_training_and_inference():
    network = cx.attach(MLP((2, 8, 3), rngs=nnx.Rngs(0)), SHARES, POSITIVE)
    model = cx.Feasible(network)
    batch, key = {"x": X}, jax.random.key(0)
    composed = cx.compose(network)
    rows = composed(nnx.state(network, nnx.Param), batch, key)
    assert {name: row.shape for name, row in rows.items()} == {"shares": (16,), "positive": (48,)}
    np.testing.assert_allclose(rows["shares"], network(X).sum(axis=1) - 1, atol=1e-6)
    for constraint in (SHARES, POSITIVE):
        assert constraint.violation(network, batch, key) > 0.01
        assert constraint.violation(model, batch, key) <= constraint.tolerance
    assert cx.certify(make_model(), [SHARES, POSITIVE], {"x": np.asarray(X)}).met


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda net: cx.Feasible(net), "needs at least one constraint"),
        (lambda net: cx.Feasible(net, []), "needs at least one constraint"),
        (lambda net: cx.Feasible(lambda x: x, SHARES), "takes an nnx.Module and constraints"),
        (lambda net: cx.Feasible(net, cx.UnitNorm(of=lambda m: m)), "takes `OutputEquals`"),
        (lambda net: cx.Feasible(net, [SHARES, SHARES]), "several constraints called 'shares'"),
        (lambda net: cx.Feasible(net, SHARES, max_iterations=0), "max_iterations=...)` must be"),
        (lambda net: cx.OutputEquals(1.0, of=3), "must be a function of x and y"),
        (lambda net: cx.OutputAtMost(float("nan"), of=max), "OutputAtMost(value=...)` must be"),
    ],
)
def test_mistakes_are_errors_when_it_is_built(make, message):
    with pytest.raises(cx.UserError, match=re.escape(message)):
        make(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))


def test_no_warning_where_all_is_met():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_model()(X)
