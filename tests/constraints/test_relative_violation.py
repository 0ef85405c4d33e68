"""Violations in units of the output, which do not fall when the output shrinks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx.models import MLP

KEY = jax.random.key(0)
# A reflection, and how it acts on the two features.
MIRROR = cx.groups.MatrixGroup.generated_by([[[-1.0, 0.0], [0.0, 1.0]]])


class Network(nnx.Module):
    """Two features, and a layer behind them."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.below = MLP((2, 8, 2), activation=jax.nn.relu, rngs=rngs)
        self.above = nnx.Linear(2, 2, use_bias=False, rngs=rngs)

    def features(self, x):
        return self.below(x)

    def __call__(self, x):
        return self.above(self.features(x))

    def rescale(self, factor):
        """One layer down and the next one up: the network stays the same function."""
        last = self.below.layers[-1]
        for layer, by in ((last, factor), (self.above, 1 / factor)):
            layer.kernel[...] *= by
        last.bias[...] *= factor


def features_turn(**settings):
    return cx.Equivariance(MIRROR, of=lambda m, x: m.features(x), name="mirror", **settings)


def unit_norm():
    return cx.UnitNorm(lambda model: model.above.kernel[...], name="unit")


def draw(count, seed=0):
    return {"x": np.random.default_rng(seed).normal(size=(count, 2)).astype(np.float32)}


def direct_parts(model, x):
    """The mean of ‖f(gx) − g f(x)‖² over both elements of the group, and that of ‖f(x)‖²."""
    flip = np.array([-1.0, 1.0])
    at = np.asarray(model.features(jnp.asarray(x)), np.float64)
    moved = np.asarray(model.features(jnp.asarray(x * flip, jnp.float32)), np.float64)
    squares = np.sum((moved - flip * at) ** 2, axis=1)
    return np.mean(squares) / 2, np.mean(np.sum(at**2, axis=1))


def test_it_is_the_ratio_of_the_mean_violation_and_the_mean_size():
    model, batch = Network(), draw(40)
    violation, size = direct_parts(model, batch["x"])
    found = features_turn().relative_violation(model, batch, KEY)
    np.testing.assert_allclose(found, violation / size, rtol=1e-5)


def test_scaling_a_layer_down_and_the_next_one_up_lowers_only_the_absolute_figure():
    model, batch, constraint = Network(), draw(40), features_turn()
    x = jnp.asarray(batch["x"])
    before = model(x)
    absolute = constraint.violation(model, batch, KEY)
    relative = constraint.relative_violation(model, batch, KEY)
    model.rescale(0.03)
    np.testing.assert_allclose(model(x), before, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        constraint.violation(model, batch, KEY), 0.03**2 * absolute, rtol=1e-4
    )
    np.testing.assert_allclose(
        constraint.relative_violation(model, batch, KEY), relative, rtol=1e-4
    )


@pytest.mark.parametrize("probes", [None, 4])
def test_that_of_a_jacobian_is_the_normalised_asymmetry(probes):
    model, x = Network(), draw(2000)["x"]
    jacobians = np.asarray(jax.vmap(jax.jacfwd(lambda one: model(one[None])[0]))(x), np.float64)
    odd = np.sum((jacobians - jacobians.swapaxes(1, 2)) ** 2)
    found = cx.JacobianSymmetry(probes=probes).relative_violation(model, {"x": x}, KEY)
    # Four probes at each of 2,000 points leave a standard error of about one percent.
    expected = odd / (4 * np.sum(jacobians**2))
    np.testing.assert_allclose(found, expected, rtol=1e-4 if probes is None else 0.06)


def test_there_is_none_without_a_scale_and_none_of_nothing():
    model, batch = Network(), draw(8)
    assert unit_norm().relative_violation(model, batch, KEY) is None
    nothing = cx.Equivariance(MIRROR, of=lambda m, x: 0 * x)
    assert nothing.relative_violation(model, batch, KEY) == 0

    @dataclasses.dataclass(frozen=True)
    class Shifted(cx.Invariance):
        def scale(self, model, batch, key):
            return jnp.zeros(())

    far = Shifted(MIRROR, of=lambda m, x: x)
    assert far.relative_violation(model, batch, KEY) == jnp.inf


def test_an_evaluation_records_it_beside_the_absolute_figure():
    train, held_out = draw(16), draw(48, seed=1)
    trainer = cx.Trainer(
        model=Network(),
        loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        optimizer=optax.sgd(0.0),
        data=cx.data.arrays(train, batch=16),
        steps=1,
        constraints=[features_turn(), unit_norm()],
        method="none",
        evaluation=cx.Evaluation(
            cx.data.arrays(held_out, batch=24, shuffle=False),
            monitor=cx.Monitor(metric="relative/mirror"),
        ),
        devices=1,
    )
    found = trainer.evaluate()
    # Two batches: the ratio is that of the means, not a mean of two ratios.
    violation, size = direct_parts(trainer.model, held_out["x"])
    np.testing.assert_allclose(found["violation/mirror"], violation, rtol=1e-5)
    np.testing.assert_allclose(found["relative/mirror"], violation / size, rtol=1e-5)
    assert "violation/unit" in found
    assert "relative/unit" not in found
    certified = trainer.certify()["mirror"]
    np.testing.assert_allclose(certified.relative, violation / size, rtol=1e-4)
