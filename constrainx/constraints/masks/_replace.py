"""A model with other values for its masked weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from flax import nnx
from jaxtyping import Array

from constrainx.constraints._attach import at_path
from constrainx.constraints.masks._probability import Masked, MaskProbability

Model = TypeVar("Model", bound=nnx.Module)
RECORD = "masked_weights"


def replace_weights(model: Model, masked: Sequence[Masked], values: Sequence[Array]) -> Model:
    """Returns a model without masks that has these weights and shares all else with ``model``.

    Each module remembers which of its weights were masked, see `find_formerly_masked`.
    """
    new = {
        # By identity, so that weights that several layers share stay shared.
        id(weight): weight.replace(value)
        for (weight, _), value in zip(masked, values, strict=True)
    }
    graph, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    leaves = [new.get(id(leaf), leaf) for leaf in flat.leaves]
    result = nnx.merge(graph, nnx.from_flat_state(zip(flat.paths, leaves, strict=True)))
    _record_masks(result)
    nnx.pop(result, MaskProbability)
    return result


def find_formerly_masked(model: nnx.Module) -> list[nnx.Param]:
    """Finds the weights that were masked in the model which this one was made from."""
    return [
        at_path(module, path)
        for _, module in nnx.iter_modules(model)
        for path in getattr(module, RECORD, ())
    ]


def _record_masks(model: nnx.Module) -> None:
    for _, module in nnx.iter_modules(model):
        masks = [value for value in vars(module).values() if isinstance(value, MaskProbability)]
        if masks and not isinstance(module, nnx.Dict):
            # On the module, where `nnx.split`, `nnx.merge` and `nnx.clone` keep it. As metadata of
            # the weights it would make the state another pytree than that of the same model built
            # without masks, and `jax.tree.map` over the two would fail.
            before = set(getattr(module, RECORD, ()))
            paths = before | {mask.get_metadata("masks") for mask in masks}
            setattr(module, RECORD, tuple(sorted(paths, key=str)))
