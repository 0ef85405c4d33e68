"""Models with their most probable weights only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from constrainx.constraints._attach import ATTRIBUTE
from constrainx.constraints._explicit import replicate, shard_like
from constrainx.constraints.masks._density import expected_density
from constrainx.constraints.masks._probability import (
    Masked,
    MaskProbability,
    count_weights,
    require_masked,
)
from constrainx.constraints.masks._replace import replace_weights
from constrainx.errors import ArgumentError

Model = TypeVar("Model", bound=nnx.Module)


def deterministic(model: Model, density: float | None = None) -> Model:
    """Returns the model with its most probable weights only, for evaluation during training.

    Keeps the round(density · N) of all N masked weights that have the highest probabilities, and
    sets the others to exactly zero. Among equal probabilities the larger weight stays, then the
    earlier one. Shares everything else with ``model``, as `sample` does. Sorts all probabilities:
    call it once for an evaluation, not for each batch.

    Args:
        model: a model that went through `add_masks`.
        density: the fraction to keep, over all masked weights together; by default the expected
            density.
    """
    masked = require_masked(model)
    if density is not None and not 0 <= density <= 1:
        raise ArgumentError(f"`density` must lie between 0 and 1, got {density!r}.")
    size = count_weights(masked)
    count = _round_count(expected_density(model) if density is None else density, size)
    values = [
        # Not a product, which would turn a negative weight into −0 and keep a NaN.
        jnp.where(keep, weight[...], 0)
        for (weight, _), keep in zip(masked, _keep_most_probable(masked, count), strict=True)
    ]
    return replace_weights(model, masked, values)


def export(model: Model, density: float | None = None) -> Model:
    """Returns `deterministic` as a model of its own: no masks, nothing shared, exact zeros.

    Constraints that may move nothing but masks, such as `MaskBudget`, are detached from it. Its
    layers remember, in a static attribute, which weights were masked, for `realised_density`.

    Args:
        model: a model that went through `add_masks`.
        density: the fraction of all masked weights to keep; by default the expected density.
    """
    plain = nnx.clone(deterministic(model, density))
    for _, module in nnx.iter_modules(plain):
        constraints = getattr(module, ATTRIBUTE, ())
        if any(constraint.wrt is MaskProbability for constraint in constraints):
            kept = tuple(c for c in constraints if c.wrt is not MaskProbability)
            setattr(module, ATTRIBUTE, kept)
    return plain


def _keep_most_probable(masked: Sequence[Masked], count: int | Array) -> list[Bool[Array, ...]]:
    """Marks the ``count`` most probable weights among all."""

    def flatten_descending(arrays: Sequence[Array]) -> Array:
        return -jnp.concatenate([replicate(array).reshape(-1) for array in arrays])

    position = jnp.arange(count_weights(masked))
    *_, order = jax.lax.sort(
        (
            flatten_descending([jnp.clip(probability[...], 0, 1) for _, probability in masked]),
            flatten_descending([jnp.abs(weight[...]) for weight, _ in masked]),
            position,
        ),
        num_keys=2,
        is_stable=True,
    )
    keep = jnp.zeros(position.shape, bool).at[order].set(position < count)
    ends = [0]
    for weight, _ in masked:
        ends.append(ends[-1] + weight.size)
    return [
        shard_like(keep[start:end].reshape(weight.shape), weight[...])
        for start, end, (weight, _) in zip(ends[:-1], ends[1:], masked, strict=True)
    ]


def _round_count(density: float | Array, size: int) -> int | Array:
    if isinstance(density, jax.core.Tracer):
        return jnp.round(density * size).astype(jnp.int32)
    # In double precision, since float32 cannot tell whole numbers apart above sixteen million.
    return round(float(density) * size)
