"""The probabilities of a mask, and how to find them in a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import nnx
from jaxtyping import Array, Float

from constrainx.constraints._attach import at_path
from constrainx.constraints.masks._pattern import Pattern, parse_pattern
from constrainx.errors import ArgumentError


class MaskProbability(nnx.Param):
    """The probabilities of keeping the weights beside it: a parameter that is trained."""

    @property
    def pattern(self) -> Pattern | None:
        """How many of each group of weights are to be kept, if that was asked for."""
        text = self.get_metadata().get("keep")
        return None if text is None else parse_pattern(text)


class Masked(NamedTuple):
    """Weights and the probabilities of their mask."""

    weight: nnx.Param
    probability: MaskProbability


def probabilities(model: nnx.Module) -> list[Float[Array, ...]]:
    """Returns the parameters behind the probabilities, which may lie outside of [0, 1]."""
    return [probability[...] for _, probability in require_masked(model)]


def find_probabilities(model: nnx.Module) -> list[tuple[tuple[Any, ...], MaskProbability]]:
    """Finds the masks of a model with their paths, in an order that depends on paths alone."""
    require_masked(model)
    flat = nnx.to_flat_state(nnx.state(model, MaskProbability))
    found = zip(flat.paths, flat.leaves, strict=True)
    return sorted(found, key=lambda item: tuple(map(str, item[0])))


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
