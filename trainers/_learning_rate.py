"""The learning rate of a step, where it can be known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from constrainx.trainers._state import State

LearningRate: TypeAlias = float | Callable[[Any], Any]


def read_learning_rate(
    before: State, after: optax.OptState, given: LearningRate | None
) -> Float[Array, ""] | None:
    """The learning rate that a step was taken with; None if it is not known.

    An Optax transformation does not reveal its learning rate. It is known if it was passed along
    with the optimizer, or if the state has one `optax.inject_hyperparams`.

    Args:
        before: the state before the step.
        after: the optimizer's state after it.
        given: the number or the schedule that the optimizer was made with.
    """
    if callable(given):
        return jnp.asarray(given(_count_updates(before)), jnp.float32)
    if given is not None:
        return jnp.asarray(given, jnp.float32)
    rates = [
        node.hyperparams["learning_rate"]
        for node in _find_nodes(after, "hyperparams")
        if "learning_rate" in node.hyperparams
    ]
    # If there are several, for groups of parameters, none of them is the learning rate.
    return jnp.asarray(rates[0], jnp.float32) if len(rates) == 1 else None


def _count_updates(state: State) -> Array:
    """The position in a schedule: a step that was skipped does not advance it."""
    counts = [
        node.count
        for node in jax.tree.leaves(state.optimizer, is_leaf=_is_schedule)
        if _is_schedule(node)
    ]
    return counts[0] if counts else state.step - state.health.skipped


def _is_schedule(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def _find_nodes(tree: Any, attribute: str) -> list[Any]:
    def has(node: Any) -> bool:
        return hasattr(node, attribute)

    return [node for node in jax.tree.leaves(tree, is_leaf=has) if has(node)]
