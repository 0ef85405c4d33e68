"""Detects a loss that does not use the masks of its model."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.interpreters import partial_eval
from jaxtyping import PyTree

from constrainx.constraints import masks
from constrainx.errors import ArgumentError
from constrainx.trainers._program import Program
from constrainx.trainers._state import State


def check_masks_used(program: Program, state: State, batch: PyTree) -> None:
    """Raises if the model has masks that are trained, and the loss does not depend on any.

    Only the budget would then move the probabilities, all in the same way, and which weights are
    pruned would be left to chance. The loss is traced with shapes only; models without masks cost
    nothing.

    Args:
        program: whose loss to look at.
        state: of the trainer.
        batch: any batch, for its shapes.
    """
    model = jax.eval_shape(program.model, state.parameters, state.rest)
    flat = nnx.to_flat_state(nnx.state(model, program.wrt))
    is_mask = {
        tuple(map(str, path)): isinstance(variable, masks.MaskProbability)
        for path, variable in zip(flat.paths, flat.leaves, strict=True)
    }
    if program.loss is None or not any(is_mask.values()):
        return

    def loss(parameters: nnx.State, rest: nnx.State, batch: PyTree) -> Any:
        return program.loss_of(parameters, rest, batch, jax.random.key(0))

    traced = jax.make_jaxpr(loss)(state.parameters, state.rest, batch)
    _, used = partial_eval.dce_jaxpr(traced.jaxpr, [True])
    # Parameters come first among the inputs.
    paths = [tuple(map(str, path)) for path in nnx.to_flat_state(state.parameters).paths]
    if not any(found for path, found in zip(paths, used, strict=False) if is_mask[path]):
        raise ArgumentError(
            "`Trainer(loss=...)` does not use the masks of the model, so nothing tells which "
            "weights to keep: take an argument `key`, and compute the loss of "
            "`cx.masks.sample(model, key)`. To train without masks for now, leave them out: "
            "`Trainer(wrt=nnx.All(nnx.Param, nnx.Not(cx.masks.MaskProbability)))`."
        )
