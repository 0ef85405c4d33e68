"""Statistics of batch normalisation, measured again, against NumPy and a loop by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(3.0, 2.0, size=(24, 3)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(3, 4, use_bias=False, rngs=rngs)
        self.first = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.middle = nnx.Linear(4, 5, use_bias=False, rngs=rngs)
        self.second = nnx.BatchNorm(5, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return self.second(self.middle(self.dropout(jax.nn.relu(self.first(self.hidden(x))))))


def normalise(x):
    return (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)


def measure_by_hand(model, batches):
    """The moments of both layers, batch by batch, in float64 and without dropout."""
    found = []
    for x in batches:
        hidden = x.astype(np.float64) @ np.asarray(model.hidden.kernel[...], np.float64)
        middle = np.maximum(normalise(hidden), 0) @ np.asarray(model.middle.kernel[...])
        found.append((hidden.mean(0), hidden.var(0), middle.mean(0), middle.var(0)))
    return found


def read_statistics(model):
    return [
        np.asarray(moment[...])
        for layer in (model.first, model.second)
        for moment in (layer.mean, layer.var)
    ]


def assert_same(found, wanted):
    def compare(a, b):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)

    jax.tree.map(compare, found, wanted)


def test_statistics_are_the_averages_of_those_of_batches():
    model = Net()
    model.first.mean.set_value(jnp.full(4, jnp.nan))  # whatever was there is forgotten
    before = nnx.state(nnx.clone(model), nnx.Not(nnx.BatchStat))
    pieces = [X[0:8], X[8:16], X[16:20]]
    assert cx.recalibrate(model, ({"x": x} for x in pieces)) == 2
    by_hand = measure_by_hand(model, pieces)
    for found, parts in zip(read_statistics(model), zip(*by_hand, strict=True), strict=True):
        np.testing.assert_allclose(found, np.average(parts, axis=0, weights=[8, 8, 4]), rtol=2e-5)
    # Nothing else has changed, neither parameters nor random streams nor the mode.
    after = nnx.state(model, nnx.Not(nnx.BatchStat))
    assert_same(after, before)
    assert not model.dropout.deterministic
    assert (model.first.use_running_average, model.second.momentum) == (False, 0.9)


def test_one_pass_over_batches_of_equal_size():
    model, same, few = Net(), Net(), Net()
    data = cx.data.arrays({"x": X}, batch=5, shuffle=False)
    assert cx.recalibrate(model, data) == 2
    by_hand = measure_by_hand(model, [X[i : i + 5] for i in (0, 5, 10, 15)])
    for found, parts in zip(read_statistics(model), zip(*by_hand, strict=True), strict=True):
        np.testing.assert_allclose(found, np.mean(parts, axis=0), rtol=2e-5)
    cx.recalibrate(same, {"x": X})  # fewer than a batch of the default size
    np.testing.assert_allclose(same.first.mean[...], (X @ same.hidden.kernel[...]).mean(0), 2e-5)
    cx.recalibrate(few, data, batches=2)
    np.testing.assert_allclose(
        few.first.mean[...], (X[:10] @ few.hidden.kernel[...]).mean(0), rtol=2e-5
    )


def test_a_pruned_model_is_evaluated_with_statistics_of_its_own():
    """Those of the model with masks are out of date once weights have been removed."""
    model = Net()
    cx.masks.add_masks(model)
    with pytest.raises(cx.UserError, match=r"masks\.deterministic"):
        cx.recalibrate(model, {"x": X})
    pruned = cx.masks.deterministic(model, density=0.5)
    cx.recalibrate(pruned, {"x": X})
    np.testing.assert_allclose(
        model.first.mean[...], (X @ pruned.hidden.kernel[...]).mean(0), rtol=2e-5, atol=1e-6
    )
    exported = cx.masks.export(model, density=0.5)
    assert cx.recalibrate(exported, {"x": X}) == 2
    exported.eval()
    # Exactly normalised, since all data is one batch.
    outputs = exported(X)
    np.testing.assert_allclose(outputs.mean(0), np.zeros(5), atol=1e-5)


class Quiet(nnx.Module):
    """Keeps the statistics that it has."""

    def __init__(self):
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x, use_running_average=True)


@pytest.mark.parametrize(
    ("model", "data", "options", "message"),
    [
        (lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)), {"x": X}, {}, "this Linear has none"),
        (Quiet, {"x": X}, {}, "measures none of its 1 `nnx.BatchNorm`"),
        (Net, [], {}, "at least one batch"),
        (Net, {"image": X}, {}, "forward=lambda"),
        (Net, {"x": X}, {"batches": 0}, "whole number, 1 or more, got 0"),
        (Net, {"x": np.full_like(X, np.inf)}, {}, "first are not finite on batch 0"),
        (
            Net,
            cx.data.from_function(lambda rng, count: {"x": X}, batch=24),
            {},
            "how many `batches=",
        ),
    ],
    ids=["no-layer", "not-reached", "no-data", "no-x", "no-batches", "not-finite", "no-end"],
)
def test_what_cannot_be_recalibrated_is_an_error(model, data, options, message):
    made = model()
    before = nnx.state(nnx.clone(made))
    with pytest.raises(cx.UserError, match=message):
        cx.recalibrate(made, data, **options)
    assert_same(nnx.state(made), before)


def test_statistics_advance_under_masks_and_constraints_see_evaluation_mode():
    """Two steps: the statistics follow the masked network, and rows are normalised by them."""
    seen = []

    class Still(cx.Constraint):
        def residual(self, model, batch, *, key):
            seen.append((model.first.use_running_average, model.dropout.deterministic))
            return model(batch["x"])

    model = Net()
    cx.masks.add_masks(model, initial=0.5)
    tx = cx.constrain(optax.sgd(1e-3), Still(reduce="rms"), model=model)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, key):
        kernel = cx.masks.sample(model, key).hidden.kernel[...]

        def loss(model):
            return jnp.mean(cx.masks.sample(model, key)(X) ** 2)

        gradients = nnx.grad(loss)(model)
        optimizer.update(model, gradients, batch={"x": X}, key=key, module=model)
        return kernel

    mean = np.zeros(4)
    for number in range(2):
        kernel = step(model, optimizer, jax.random.key(number))
        mean = 0.99 * mean + 0.01 * (X @ kernel).mean(0)
        np.testing.assert_allclose(model.first.mean[...], mean, rtol=1e-4, atol=1e-6)
    assert seen
    assert set(seen) == {(True, True)}
