"""Random draws of the masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from constrainx.constraints.masks._probability import Masked, require_masked
from constrainx.constraints.masks._replace import replace_weights
from constrainx.constraints.masks._straight_through import straight_through

Model = TypeVar("Model", bound=nnx.Module)


def sample(model: Model, key: Array) -> Model:
    """Returns the model with weights w·m for one draw of the masks: call it in the loss function.

    The result has the same class and no masks. It shares everything but the masked weights with
    ``model``, so batch statistics and random streams advance there, too.

    Args:
        model: a model that went through `add_masks`.
        key: a new one each step; the same key gives the same draw.
    """
    masked = require_masked(model)
    values = []
    for (weight, probability), draw in zip(masked, draw_masks(masked, key), strict=True):
        mask = straight_through(draw.astype(probability.dtype), probability[...])
        values.append(weight[...] * mask.astype(weight.dtype))
    return replace_weights(model, masked, values)


def draw_masks(masked: Sequence[Masked], key: Array) -> list[Bool[Array, ...]]:
    """Draws one mask for each array of weights, each with a key of its own.

    By 16 random bits for each weight, half the cost of a uniform number: drawing is a large part of
    a step with masks. A probability is rounded to a multiple of 2⁻¹⁶; 0 and 1 stay certain.
    """
    return [
        _draw(jax.random.fold_in(key, i), jnp.clip(probability[...], 0, 1))
        for i, (_, probability) in enumerate(masked)
    ]


def _draw(key: Array, probability: Array) -> Bool[Array, ...]:
    bits = jax.random.bits(key, probability.shape, "uint16")
    return bits.astype(jnp.float32) + 0.5 < 2**16 * probability
