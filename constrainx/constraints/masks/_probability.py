"""The probabilities of a mask, and how to find them in a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flax import nnx
from jaxtyping import Array, Float

from constrainx.constraints._attach import at_path
from constrainx.errors import ArgumentError


class MaskProbability(nnx.Param):
    """The probabilities of keeping the weights beside it: a parameter that is trained."""


class Masked(NamedTuple):
    """Weights and the probabilities of their mask."""

    weight: nnx.Param
    probability: MaskProbability


def probabilities(model: nnx.Module) -> list[Float[Array, ...]]:
    """Returns the parameters behind the probabilities, which may lie outside of [0, 1]."""
    return [probability[...] for _, probability in require_masked(model)]


def has_masks(model: nnx.Module) -> bool:
    """Tells whether the model, or a part of it, went through `add_masks`."""
    return bool(find_masked(model))


def find_masked(model: nnx.Module) -> list[Masked]:
    """Finds the masks of a model and their weights, in an order that depends on paths alone."""
    found = {
        (*map(str, path), name): Masked(at_path(module, value.get_metadata("masks")), value)
        for path, module in nnx.iter_modules(model)
        for name, value in vars(module).items()
        if isinstance(value, MaskProbability)
    }
    return [found[path] for path in sorted(found)]


def require_masked(model: nnx.Module) -> list[Masked]:
    """Finds the masks of a model, and raises an error if there are none."""
    masked = find_masked(model)
    if not masked:
        raise ArgumentError(
            f"this {type(model).__name__} has no masks: call `cx.masks.add_masks(model)` first."
        )
    return masked


def count_weights(masked: Sequence[Masked]) -> int:
    """Counts the masked weights."""
    return sum(weight.size for weight, _ in masked)
