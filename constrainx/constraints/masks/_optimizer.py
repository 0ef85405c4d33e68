"""An optimizer whose learning rate for probabilities is a multiple of that for weights."""

from __future__ import annotations

import math
from typing import Any

import jax
import optax
from flax import nnx
from jaxtyping import PyTree

from constrainx.constraints.masks._moments import name_path
from constrainx.constraints.masks._probability import find_probabilities, require_masked
from constrainx.errors import ArgumentError


def with_mask_rate(
    model: nnx.Module, optimizer: optax.GradientTransformation, ratio: float = 10.0
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer, with a learning rate ``ratio`` times as large for the probabilities.

    A probability has to travel from its initial value to 0 or 1 while training lasts, which is far
    for steps of the size that suits weights: Adam with a learning rate of 1e-3 needs a thousand
    steps in one direction. Too slow, and many probabilities are still undecided when the network is
    pruned. The ratio applies to whatever learning rate the optimizer has, schedules included.

    >>> import jax.numpy as jnp, optax
    >>> from constrainx import masks
    >>> from flax import nnx
    >>> model = masks.add_masks(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    >>> optimizer = masks.with_mask_rate(model, optax.sgd(0.1), ratio=5.0)
    >>> parameters = nnx.as_pure(nnx.state(model, nnx.Param))
    >>> ones = jax.tree.map(jnp.ones_like, parameters)
    >>> updates, _ = optimizer.update(ones, optimizer.init(parameters), parameters)
    >>> print(updates["kernel"][0, 0], updates["kernel_mask"][0, 0])
    -0.1 -0.5

    Args:
        model: a model that went through `add_masks`.
        optimizer: any Optax transformation, for all parameters.
        ratio: of the learning rates. From 10 to 30 on handwritten digits the accuracy was the same.
    """
    require_masked(model)
    if not (math.isfinite(ratio) and ratio > 0):
        raise ArgumentError(f"`with_mask_rate(ratio=...)` must be above 0, got {ratio!r}.")
    inner = optax.with_extra_args_support(optimizer)
    masks = {tuple(map(str, path)) for path, _ in find_probabilities(model)}

    def is_mask(path: tuple[Any, ...]) -> bool:
        return name_path(path) in masks

    def init(parameters: PyTree) -> optax.OptState:
        paths = jax.tree_util.tree_leaves_with_path(parameters)
        if not any(is_mask(path) for path, _ in paths):
            raise ArgumentError(
                "`with_mask_rate(model, ...)` has got parameters without the masks of that model: "
                "add masks before the optimizer is made, and train them, too."
            )
        return inner.init(parameters)

    def update(
        updates: PyTree, state: optax.OptState, parameters: PyTree = None, **extra: Any
    ) -> tuple[PyTree, optax.OptState]:
        updates, state = inner.update(updates, state, parameters, **extra)

        def scale(path: tuple[Any, ...], leaf: Any) -> Any:
            return leaf * ratio if is_mask(path) else leaf

        return jax.tree_util.tree_map_with_path(scale, updates), state

    return optax.GradientTransformationExtraArgs(init, update)
