"""A model with other values for its masked weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from flax import nnx
from jaxtyping import Array

from constrainx.constraints.masks._probability import Masked, MaskProbability

Model = TypeVar("Model", bound=nnx.Module)


def replace_weights(model: Model, masked: Sequence[Masked], values: Sequence[Array]) -> Model:
    """Returns a model without masks that has these weights and shares all else with ``model``."""
    new = {
        # By identity, so that weights that several layers share stay shared.
        id(weight): weight.replace(value)
        for (weight, _), value in zip(masked, values, strict=True)
    }
    graph, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    leaves = [new.get(id(leaf), leaf) for leaf in flat.leaves]
    result = nnx.merge(graph, nnx.from_flat_state(zip(flat.paths, leaves, strict=True)))
    nnx.pop(result, MaskProbability)
    return result
