"""The model with its most probable weights, differentiable: masks without a draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from constrainx.constraints.masks._pattern import keep_in_groups, split_groups
from constrainx.constraints.masks._probability import Masked, require_masked
from constrainx.constraints.masks._replace import replace_weights
from constrainx.constraints.masks._select import find_expected_cut
from constrainx.constraints.masks._straight_through import straight_through

Model = TypeVar("Model", bound=nnx.Module)


def top(model: Model) -> Model:
    """Returns the model with weights w·m, where m keeps the most probable: call it in the loss.

    As many weights are kept as the probabilities add up to, so that a `MaskBudget` holds for the
    masks as well: exactly for up to 32,768 weights, and to a few of ten thousand for more. With a
    pattern that is so in each group of weights. It has the straight-through gradient of `sample`,
    needs no key, and costs less than a draw. Unlike `sample`, it does not try out weights that are
    less probable; those still get a gradient for their probability.

    >>> from constrainx import masks
    >>> from flax import nnx
    >>> model = masks.add_masks(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), initial=lambda w: w > 0)
    >>> bool(((masks.top(model).kernel[...] != 0) == (model.kernel[...] > 0)).all())
    True

    Args:
        model: a model that went through `add_masks`.
    """
    masked = require_masked(model)
    values = []
    for (weight, probability), flag in zip(masked, keep_expected(masked), strict=True):
        mask = straight_through(flag.astype(probability.dtype), probability[...])
        values.append(weight[...] * mask.astype(weight.dtype))
    return replace_weights(model, masked, values)


def keep_expected(masked: Sequence[Masked]) -> list[Bool[Array, ...]]:
    """Marks the most probable weights, as many as the probabilities add up to, or nearly."""
    free = [jax.lax.stop_gradient(p[...]) for _, p in masked if p.pattern is None]
    cut = find_expected_cut(free) if free else jnp.zeros(())
    keep = []
    for _, probability in masked:
        p = jax.lax.stop_gradient(probability[...])
        if probability.pattern is None:
            keep.append(p >= cut)
        else:
            size = probability.pattern.group
            kept = jnp.round(jnp.sum(split_groups(jnp.clip(p, 0, 1), size), -2, keepdims=True))
            keep.append(keep_in_groups(p, p, size, kept.astype(jnp.int32)))
    return keep
