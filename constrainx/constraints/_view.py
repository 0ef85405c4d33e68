"""The model that a constraint sees: as it is now, in evaluation mode, its random streams seeded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from constrainx.errors import ArgumentError

Path: TypeAlias = tuple[Any, ...]


def view_model(model: nnx.Module, parameters: PyTree, key: Array) -> Any:
    """A copy of the model with these parameters, in evaluation mode.

    Its random streams are seeded from the key, so that the same key gives the same draw. A copy,
    because a residual must not write batch statistics into the model.

    Args:
        model: with its current state.
        parameters: some or all of its variables, as an optimizer hands them over.
        key: the constraint's.
    """
    graph, state = nnx.split(model)
    held = flatten_state(state)
    given = flatten_state(parameters)
    streams = {path: leaf for path, leaf in held.items() if isinstance(leaf, nnx.RngState)}
    seeded = dict(zip(streams, reseed_streams(list(streams.values()), key), strict=True))
    merged = nnx.merge(
        graph, nnx.from_flat_state(list({**held, **seeded, **given}.items())), copy=True
    )
    merged.eval()
    return merged


def reseed_streams(streams: PyTree, key: Array) -> PyTree:
    """Random streams whose keys follow from this one, with their counts at zero.

    Stacked streams, as `nnx.split_rngs` makes them, get a key for each of their parts.
    """
    leaves, tree = jax.tree.flatten(streams)
    seeded = []
    for index, leaf in enumerate(leaves):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            seeded.append(jnp.zeros_like(leaf))
            continue
        own = jax.random.fold_in(key, index)
        seeded.append(jax.random.split(own, leaf.shape) if leaf.shape else own)
    return jax.tree.unflatten(tree, seeded)


def check_current(model: nnx.Module, parameters: PyTree, *, owner: str) -> None:
    """Raises where the model's other state may be that of the time when it was handed over.

    Inside of `jax.jit` and `nnx.jit` the parameters are those of now, but batch statistics and
    frozen weights that a constraint finds on the model from outside are not.

    Args:
        model: as the constraint holds it.
        parameters: as the optimizer hands them over.
        owner: the name of the constraint.
    """
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(parameters)):
        return
    given = flatten_state(parameters)
    stale = [
        path
        for path, leaf in flatten_state(nnx.state(model)).items()
        if path not in given
        and not isinstance(leaf, nnx.RngState)
        and not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(leaf))
    ]
    if stale:
        names = ", ".join(".".join(map(str, path)) for path in stale[:3])
        more = f" and {len(stale) - 3} more" if len(stale) > 3 else ""
        raise ArgumentError(
            f"constraint {owner!r} needs the model as it is now, but inside of a compiled function "
            f"its {names}{more} cannot be known: pass `module=model` to `update`, with the model "
            "that the function was given."
        )


def list_paths(parameters: PyTree) -> list[Path]:
    """The path of each leaf, in the order of `jax.tree.leaves`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(parameters)
    return [tuple(_read(entry) for entry in path if _read(entry) is not None) for path, _ in flat]


def flatten_state(state: PyTree) -> Mapping[Path, Any]:
    """The variables of an NNX state by path."""
    flat = nnx.to_flat_state(state)
    return dict(zip(flat.paths, flat.leaves, strict=True))


def _read(entry: Any) -> Any:
    if isinstance(entry, jax.tree_util.DictKey):
        return entry.key
    if isinstance(entry, jax.tree_util.SequenceKey):
        return entry.idx
    # The value of a variable, which is not a step of its path.
    return None
