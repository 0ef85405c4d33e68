"""The size that gradients have had, as an adaptive optimizer keeps it for each weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float


def find_gradient_sizes(
    state: optax.OptState, places: Sequence[tuple[str, ...]], decay: float
) -> list[Float[Array, ...]] | None:
    """Returns √ν̂ for the parameters at these places, or None if the optimizer keeps no ν.

    Args:
        state: of the optimizer, after its step.
        places: the paths of the parameters.
        decay: of ν, to correct it for its start at zero as Adam does.
    """
    flat: dict[tuple[str, ...], Array] = {}
    # Several optimizers, each for some of the parameters, have a tree of moments each.
    for _, moments in optax.tree_utils.tree_get_all_with_path(state, "nu"):
        leaves = jax.tree_util.tree_leaves_with_path(moments)
        flat |= {name_path(path): leaf for path, leaf in leaves}
    if not all(place in flat for place in places):
        return None
    count = optax.tree_utils.tree_get_all_with_path(state, "count")
    taken = jnp.asarray(count[0][1], float) if count else jnp.inf
    return [jnp.sqrt(flat[place] / (1 - decay**taken)) for place in places]


def name_path(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The names along a path, without the one that a variable has for its value."""
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey):
        path = path[:-1]
    return tuple(map(_name_key, path))


def _name_key(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
