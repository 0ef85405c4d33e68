"""Models with their most probable weights only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from constrainx.constraints._attach import ATTRIBUTE
from constrainx.constraints.masks._pattern import keep_in_groups
from constrainx.constraints.masks._probability import (
    Masked,
    MaskProbability,
    count_weights,
    require_masked,
)
from constrainx.constraints.masks._replace import replace_weights
from constrainx.constraints.masks._select import keep_largest
from constrainx.errors import ArgumentError

Model = TypeVar("Model", bound=nnx.Module)


def deterministic(model: Model, density: float | None = None) -> Model:
    """Returns the model with its most probable weights only, for evaluation during training.

    Keeps the round(density · N) of all N masked weights that have the highest probabilities, as
    they are stored, not clipped; and with a pattern, just those of each group. Sets the others to
    exactly zero. Among equal probabilities the larger weight stays, then the earlier one. Shares
    everything else with ``model``, as `sample` does. Takes about twenty passes over the
    probabilities: call it once for an evaluation, not for each batch.

    Args:
        model: a model that went through `add_masks`.
        density: the fraction to keep, over all masked weights together; by default the expected
            density.
    """
    masked = require_masked(model)
    if density is not None and not 0 <= density <= 1:
        raise ArgumentError(f"`density` must lie between 0 and 1, got {density!r}.")
    values = [
        # Not a product, which would turn a negative weight into −0 and keep a NaN.
        jnp.where(keep, weight[...], 0)
        for (weight, _), keep in zip(masked, keep_most_probable(masked, density), strict=True)
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
        kept = tuple(c for c in constraints if not _selects_masks_alone(c.wrt))
        if len(kept) < len(constraints):
            setattr(module, ATTRIBUTE, kept)
    return plain


def _selects_masks_alone(wrt: Any) -> bool:
    return wrt is MaskProbability or (
        isinstance(wrt, nnx.All) and any(_is_type(p) for p in wrt.predicates)
    )


def _is_type(predicate: Any) -> bool:
    return getattr(predicate, "type", None) is MaskProbability


def keep_most_probable(
    masked: Sequence[Masked], density: float | Array | None = None
) -> list[Bool[Array, ...]]:
    """Marks the most probable weights of all, or of each group where there is a pattern."""
    free = [one for one in masked if one.probability.pattern is None]
    chosen: Iterator[Bool[Array, ...]] = iter(())
    if free:
        if density is None:
            expected = jnp.stack([jnp.sum(jnp.clip(p[...], 0, 1)) for _, p in free])
            density = jnp.sum(expected) / count_weights(free)
        elif len(free) < len(masked):
            raise ArgumentError(
                "`density` is for masks without a pattern, and some of these have one: leave it "
                "out."
            )
        count = _round_count(density, count_weights(free))
        # Ranked as they are stored: of two that are certain, one may be the safer.
        values = [p[...] for _, p in free]
        chosen = iter(keep_largest(values, [jnp.abs(weight[...]) for weight, _ in free], count))
    elif density is not None:
        raise ArgumentError(
            "these masks have a pattern, which says what to keep: leave `density` out."
        )
    return [
        next(chosen)
        if (pattern := p.pattern) is None
        else keep_in_groups(p[...], jnp.abs(weight[...]), pattern.group, pattern.kept)
        for weight, p in masked
    ]


def _round_count(density: float | Array, size: int) -> int | Array:
    if isinstance(density, jax.core.Tracer):
        return jnp.round(density * size).astype(jnp.int32)
    # In double precision, since float32 cannot tell whole numbers apart above sixteen million.
    return round(float(density) * size)
