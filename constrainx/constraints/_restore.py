"""A module that came through `nnx.Optimizer.update`, put together again.

On the way to Optax, `nnx.Optimizer` replaces variables in its keyword arguments by their values. A
module then has arrays where it had parameters, batch statistics and random streams, and a part that
it uses in two places has become two parts.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx

from constrainx.constraints._attach import at_path
from constrainx.errors import ArgumentError


def restore_variables(module: nnx.Module, like: nnx.Module) -> nnx.Module:
    """The module with variables, shared as they are in another of the same structure.

    Args:
        module: with its current values; returned as it is if it still has its variables.
        like: the model that it was once.
    """
    graph, state = nnx.split(like)
    flat = nnx.to_flat_state(state)
    restored: list[Any] = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        value = _find(module, path)
        if isinstance(value, nnx.Variable):
            return module
        if value is None:
            if not isinstance(leaf, nnx.Intermediate):
                raise ArgumentError(
                    f"`module=` has no {'.'.join(map(str, path))}, which the model has that the "
                    "constraint was made with: pass the same model, or make the optimizer anew."
                )
            restored.append(leaf)
        else:
            restored.append(leaf.replace(value) if isinstance(leaf, nnx.Variable) else value)
    merged = nnx.merge(graph, nnx.from_flat_state(list(zip(flat.paths, restored, strict=True))))
    for path, part in nnx.iter_modules(merged):
        _copy_settings(at_path(module, path), part)
    return merged


def _find(module: nnx.Module, path: tuple[Any, ...]) -> Any:
    try:
        return at_path(module, path)
    except (AttributeError, IndexError, KeyError):
        return None


def _copy_settings(source: nnx.Module, target: nnx.Module) -> None:
    """Copies attributes that are no part of the state, such as flags, which may have changed."""
    known = vars(target)
    for name, value in vars(source).items():
        # What is new may hold arrays that were sown, which nobody reads.
        is_setting = not _has_state(known.get(name, value))
        if is_setting and not name.startswith("_pytree__"):
            setattr(target, name, value)


def _has_state(value: Any) -> bool:
    kinds = (nnx.Variable, nnx.Pytree)
    leaves = jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(leaf, (*kinds, jax.Array, np.ndarray)) for leaf in leaves)
