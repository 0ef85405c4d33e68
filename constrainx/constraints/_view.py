"""The model that a constraint sees: as it is now, in evaluation mode, its random streams seeded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from constrainx.constraints._live import find_live_inputs
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
    given = name_leaves(parameters)
    _check_paths(given, held, model)
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


def find_stale(model: nnx.Module, parameters: PyTree, *, is_given: bool) -> tuple[list[Path], str]:
    """The rest of the model's state that may be older than the parameters, and why.

    Inside of `jax.jit` and `nnx.jit` the parameters are those of now, but batch statistics and
    frozen weights of a model from outside are not. Outside, a model that does not hold the
    parameters is not the one that is trained.

    Args:
        model: as the constraint holds it, or as it was handed over with the parameters.
        parameters: as the optimizer hands them over.
        is_given: whether the model was handed over with the parameters: then it may hold constants,
            as long as it is from the same trace.
    """
    held = {
        path: leaf
        for path, leaf in flatten_state(nnx.state(model)).items()
        if not isinstance(leaf, nnx.RngState)
    }
    given = name_leaves(parameters)
    own = [(leaf, held[path]) for path, leaf in given.items() if path in held]
    rest = {path: leaf for path, leaf in held.items() if path not in given}
    if all(leaf is value for leaf, var in own for value in jax.tree.leaves(var)):
        return [], ""
    if _is_traced(parameters):
        if is_given and _is_traced([variable for _, variable in own]):
            return [], ""
        stale = [path for path, leaf in rest.items() if not _is_traced(leaf)]
        return stale, "inside of a compiled function"
    reason = "for parameters that are not those of the model it was made with"
    return [] if is_given else list(rest), reason


def keep_read(
    function: Callable[[nnx.Module], PyTree], model: nnx.Module, paths: Sequence[Path]
) -> list[Path]:
    """Those of a model's variables that what a function returns depends on.

    Args:
        function: of the model; it is traced.
        model: the model.
        paths: the variables in question.
    """
    graph, state = nnx.split(model)
    flat = flatten_state(state)

    def call(variables: list[Any]) -> PyTree:
        changed = {**flat, **dict(zip(paths, variables, strict=True))}
        return function(nnx.merge(graph, nnx.from_flat_state(list(changed.items())), copy=True))

    variables = [flat[path] for path in paths]
    live = find_live_inputs(jax.make_jaxpr(call)(variables))
    by_variable = jax.tree.unflatten(jax.tree.structure(variables), live)
    return [
        path for path, flags in zip(paths, by_variable, strict=True) if any(jax.tree.leaves(flags))
    ]


def _is_traced(tree: PyTree) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _check_paths(given: Mapping[Path, Any], held: Mapping[Path, Any], model: nnx.Module) -> None:
    unknown = [".".join(map(str, path)) for path in given if path not in held]
    if unknown:
        raise ArgumentError(
            f"the parameters have {unknown[0] or 'an array without a name'!r}, which this "
            f"{type(model).__name__} does not have: constraints on a model are for the parameters "
            "of that model, `nnx.state(model, nnx.Param)`."
        )


def name_leaves(parameters: PyTree) -> Mapping[Path, Any]:
    """The arrays of the parameters by path."""
    return dict(zip(list_paths(parameters), jax.tree.leaves(parameters), strict=True))


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
