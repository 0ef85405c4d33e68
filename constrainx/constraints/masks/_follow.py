"""An optimizer for weights, and a rule for the probabilities of their masks."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from constrainx.constraints.masks._moments import find_gradient_sizes, name_path
from constrainx.constraints.masks._probability import find_probabilities
from constrainx.constraints.masks._rules import Memory, Seen
from constrainx.errors import ArgumentError


class Rule(Protocol):
    """What becomes of the probabilities of masks in a step; `Learned` and `Magnitude` are two."""

    def start(self, probabilities: list[Float[Array, ...]]) -> Memory:
        """What it remembers before the first step."""
        ...

    def move(self, seen: Seen, memory: Memory) -> tuple[list[Float[Array, ...]], Memory]:
        """The updates of the probabilities, and what it remembers from now on."""
        ...


class RuleState(NamedTuple):
    """What an optimizer that follows a rule remembers.

    Attributes:
        step: how many steps have been taken.
        inner: the state of the optimizer of the weights.
        memory: of the rule.
    """

    step: Int[Array, ""]
    inner: optax.OptState
    memory: Memory


def follow_rule(
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    rule: Rule,
    *,
    decay: float = 0.999,
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that moves weights by Optax and the probabilities of masks by a rule.

    Args:
        model: a model that went through `add_masks`.
        optimizer: for the weights; it does not see the probabilities.
        rule: for the probabilities.
        decay: of the optimizer's second moments, as Adam's ``b2``.
    """
    found = find_probabilities(model)
    places = [tuple(map(str, path)) for path, _ in found]
    weights = [
        (*place[:-1], *map(str, variable.get_metadata("masks")))
        for place, (_, variable) in zip(places, found, strict=True)
    ]
    is_mask = set(places)

    def is_weight(tree: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: name_path(path) not in is_mask, tree
        )

    inner = optax.with_extra_args_support(optax.masked(optimizer, is_weight))

    def init(parameters: PyTree) -> RuleState:
        flat = _flatten(parameters)
        missing = [place for place in places if place not in flat]
        if missing:
            raise ArgumentError(
                "an optimizer that prunes has got parameters without the masks of its model, "
                f"such as {'.'.join(missing[0])!r}: make it after the masks, for all parameters."
            )
        memory = rule.start([flat[place] for place in places])
        return RuleState(jnp.zeros((), jnp.int32), inner.init(parameters), memory)

    def update(
        updates: PyTree, state: RuleState, parameters: PyTree = None, **extra: Any
    ) -> tuple[PyTree, RuleState]:
        if parameters is None:
            raise ArgumentError("pruning needs parameters: call `update(grads, state, params)`.")
        gradients = _flatten(updates)
        updates, after = inner.update(updates, state.inner, parameters, **extra)
        flat, moves = _flatten(parameters), _flatten(updates)
        seen = Seen(
            step=state.step,
            weights=[flat[place] + moves[place] for place in weights],
            probabilities=[flat[place] for place in places],
            gradients=[gradients[place] for place in places],
            sizes=find_gradient_sizes(after, weights, decay),
        )
        moved, memory = rule.move(seen, state.memory)
        new = dict(zip(places, moved, strict=True))
        updates = jax.tree_util.tree_map_with_path(
            lambda path, leaf: new.get(name_path(path), leaf), updates
        )
        return updates, RuleState(state.step + 1, after, memory)

    return optax.GradientTransformationExtraArgs(init, update)


def _flatten(tree: PyTree) -> dict[tuple[str, ...], Array]:
    return {name_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
