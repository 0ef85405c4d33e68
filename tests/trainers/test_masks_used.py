"""Masks in the trainer: a loss must use them, and their learning rate is their own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx.errors import ArgumentError
from tests.trainers.problems import Net, squared, trainer

WITHOUT_MASKS = nnx.All(nnx.Param, nnx.Not(cx.masks.MaskProbability))


def sampled(model, batch, key):
    return squared(cx.masks.sample(model, key), batch)


def pruned(model, batch):
    return squared(cx.masks.deterministic(model), batch)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_loss_that_forgets_the_masks_is_refused(precision):
    forgetful = trainer(
        model=cx.masks.add_masks(Net()),
        constraints=[cx.MaskBudget(0.5)],
        precision=precision,
    )
    for start in (forgetful.validate, forgetful.fit):
        with pytest.raises(ArgumentError, match=r"cx\.masks\.sample\(model, key\)"):
            start()


@pytest.mark.parametrize(
    "options",
    [{"loss": sampled}, {"loss": pruned}, {"wrt": WITHOUT_MASKS}],
    ids=["sampled", "pruned", "without masks"],
)
def test_a_loss_that_uses_the_masks_or_need_not_is_accepted(options):
    trainer(model=cx.masks.add_masks(Net()), **options).validate()


@pytest.mark.parametrize("is_pure", [True, False])
def test_the_ratio_multiplies_the_updates_of_probabilities_alone(is_pure):
    model = cx.masks.add_masks(Net())
    parameters = nnx.state(model, nnx.Param)
    parameters = nnx.as_pure(parameters) if is_pure else parameters
    gradients = jax.tree.map(
        lambda leaf: jnp.sin(1.0 + jnp.arange(leaf.size).reshape(leaf.shape)), parameters
    )
    plain = optax.adam(optax.constant_schedule(1e-2))
    scaled = cx.masks.with_mask_rate(model, plain, ratio=7.0)
    one, _ = plain.update(gradients, plain.init(parameters), parameters)
    other, _ = scaled.update(gradients, scaled.init(parameters), parameters)
    for path, found in nnx.to_flat_state(nnx.as_pure(other)):
        wanted = dict(nnx.to_flat_state(nnx.as_pure(one)))[path]
        factor = 7.0 if path[-1].endswith("_mask") else 1.0
        np.testing.assert_allclose(found, factor * wanted, rtol=1e-6)


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan")])
def test_a_ratio_that_makes_no_sense_is_refused(ratio):
    with pytest.raises(ArgumentError, match="ratio"):
        cx.masks.with_mask_rate(cx.masks.add_masks(Net()), optax.sgd(0.1), ratio)


def test_masks_that_the_optimizer_does_not_see_are_an_error():
    optimizer = cx.masks.with_mask_rate(cx.masks.add_masks(Net()), optax.sgd(0.1))
    with pytest.raises(ArgumentError, match="add masks before"):
        optimizer.init(nnx.state(Net(), nnx.Param))
