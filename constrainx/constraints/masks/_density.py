"""The density of a model: the fraction of its weights that are kept."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from constrainx.constraints.masks._add import kernels
from constrainx.constraints.masks._probability import (
    MaskProbability,
    count_weights,
    find_masked,
    require_masked,
)
from constrainx.constraints.masks._replace import find_formerly_masked
from constrainx.constraints.masks._sample import draw_masks
from constrainx.constraints.masks._straight_through import straight_through
from constrainx.errors import ArgumentError


def expected_density(model: nnx.Module) -> Float[Array, ""]:
    """Returns mean(p) over all masked weights, the fraction that a draw keeps on average."""
    masked = require_masked(model)
    counts = [jnp.sum(_clip(probability)) for _, probability in masked]
    return jnp.stack(counts).sum() / count_weights(masked)


def realised_density(
    model: nnx.Module, key: Array | None = None, *, where: Any = None
) -> Float[Array, ""]:
    """Returns the fraction of weights that are kept.

    Args:
        model: a model with masks, or one without, of which the non-zero weights are counted.
        key: for a model with masks: the draw, the same as that of ``sample(model, key)``.
        where: for a model without masks: an NNX filter, as in `add_masks`, that selects the weights
            to count. By default those that were masked, for a model from `sample`, `deterministic`
            or `export`, and all `kernels` for any other.
    """
    masked = find_masked(model)
    if masked:
        if key is None:
            raise ArgumentError(
                "`realised_density` of a model with masks depends on the draw: pass its `key`, or "
                "pass `export(model)` for the density of the pruned model."
            )
        kept = draw_masks(masked, key)
    else:
        kept = [weight[...] != 0 for weight in _select_weights(model, where)]
    return jnp.stack([jnp.sum(each) for each in kept]).sum() / sum(each.size for each in kept)


def _select_weights(model: nnx.Module, where: Any) -> list[nnx.Param]:
    formerly_masked = find_formerly_masked(model)
    if where is None and formerly_masked:
        return formerly_masked
    selected = nnx.All(nnx.Param, kernels if where is None else where)
    leaves = nnx.to_flat_state(nnx.state(model, selected)).leaves
    if not leaves:
        raise ArgumentError(
            f"`realised_density(where=...)` selects no parameter of this {type(model).__name__}. "
            "Pass an NNX filter that selects some, such as "
            "`lambda path, variable: variable.ndim >= 2`."
        )
    return list(leaves)


def _clip(probability: MaskProbability) -> Array:
    return straight_through(jnp.clip(probability[...], 0, 1), probability[...])
