"""A stack of modules applied one after the other: unrolled, as a loop, or recomputed."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from constrainx.models._partition import split_examples


def repeat_modules(
    modules: Sequence[nnx.Module],
    x: Float[Array, ...],
    inputs: Float[Array, "modules ..."],
    *,
    period: int,
    remat: bool,
    scan: bool,
) -> Float[Array, ...]:
    """Computes ``x = module(x, input)`` for each module in turn.

    As a loop, XLA compiles the period once however many there are. The parameters are stacked for
    it within the compiled function, so that the model, its checkpoints and its masks are the same
    either way.

    Args:
        modules: of equal structure after each period; they have no state but parameters.
        x: what the first one takes, of the shape that each returns.
        inputs: one for each module.
        period: how many modules are one round of the loop.
        remat: whether to compute each round again in the backward pass.
        scan: whether to make a loop of the rounds; what is left over at the end is unrolled.
    """
    rounds = [tuple(modules[i : i + period]) for i in range(0, len(modules), period)]
    whole = len(modules) // period

    def apply(graph: nnx.GraphDef, x: Array, state: nnx.State, inputs: Array) -> Array:
        x = split_examples(x)
        for module, given in zip(nnx.merge(graph, state), inputs, strict=True):
            x = module(x, given)
        return split_examples(x)

    if remat:
        apply = jax.checkpoint(apply, static_argnums=0)
    start = 0
    if scan and whole > 1:
        graph, first = nnx.split(rounds[0])
        states = [first, *(nnx.state(each) for each in rounds[1:whole])]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        start = whole * period
        grouped = inputs[:start].reshape(whole, period, *inputs.shape[1:])
        x, _ = jax.lax.scan(lambda x, item: (apply(graph, x, *item), None), x, (stacked, grouped))
    for index in range(start, len(modules), period):
        graph, state = nnx.split(rounds[index // period])
        x = apply(graph, x, state, inputs[index : index + period])
    return x
