"""Finding the place where a network stops commuting with a group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from constrainx.constraints._symmetry import FiniteGroup, Representation
from constrainx.errors import ArgumentError


class Seen(NamedTuple):
    """One call of a layer: its path, what went in and what came out."""

    path: str
    input: Array
    output: Array


def check_layers_commute(
    model: nnx.Module,
    call: Callable[[Any], Any],
    group: FiniteGroup,
    layers: Mapping[str, Any],
    *,
    rtol: float,
) -> None:
    """Raises an error that names the first place where a network does not commute with a group.

    Each layer is tested by itself, and what stands between two layers from the output of one to the
    input of the next, both on random arrays of the shapes that ``call`` gives them.

    Args:
        model: whose layers satisfy the constraint.
        call: runs it.
        group: acts on inputs and outputs.
        layers: by path: what has an ``input`` and an ``output`` representation.
        rtol: which relative difference is rounding.
    """
    calls = record_calls(model, call, set(layers))
    missing = sorted(set(layers) - {seen.path for seen in calls})
    if missing:
        raise ArgumentError(
            f"`check(call=...)` does not run {', '.join(map(repr, missing))}: pass a function that "
            "runs every layer of the constraint, such as `lambda m: m.features(images)`."
        )
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    for seen in calls:
        layer = layers[seen.path]
        difference = _difference(
            modules[seen.path], group, layer.input, layer.output, seen.input.shape, seen.input.dtype
        )
        if difference > rtol:
            raise ArgumentError(
                f"the layer {seen.path!r} does not commute with {group} on inputs of shape "
                f"{seen.input.shape[1:]} (relative difference {difference:.1e}): its stride or "
                "padding breaks the symmetry. Choose them so that the windows of an image and of "
                "the rotated image are the same."
            )
    for before, after in itertools.pairwise(calls):
        between = _between(model, call, before.path, after.path)
        difference = _difference(
            between,
            group,
            layers[before.path].output,
            layers[after.path].input,
            before.output.shape,
            before.output.dtype,
        )
        if difference > rtol:
            raise ArgumentError(
                f"what stands between the layers {before.path!r} and {after.path!r} does not "
                f"commute with {group} (relative difference {difference:.1e}): pooling must tile "
                "the image evenly, and norms and activations must treat the channels of a block "
                "alike."
            )


def record_calls(model: nnx.Module, call: Callable[[Any], Any], paths: set[str]) -> list[Seen]:
    """What some layers of a model are given and return, in the order of their calls."""
    calls: list[Seen] = []

    def record(path: str, layer: Callable[..., Array], x: Array) -> Array:
        y = layer(x)
        calls.append(Seen(path, x, y))
        return y

    call(_with_calls(model, dict.fromkeys(paths, record)))
    return calls


def _between(
    model: nnx.Module, call: Callable[[Any], Any], before: str, after: str
) -> Callable[[Array], Array]:
    """What the network computes from the output of one layer to the input of another."""

    def function(x: Array) -> Array:
        found: list[Array] = []

        def replace(path: str, layer: Callable[..., Array], given: Array) -> Array:
            del path
            return x.astype(layer(given).dtype)

        def stop(path: str, layer: Callable[..., Array], given: Array) -> Array:
            del path
            found.append(given)
            return layer(given)

        call(_with_calls(model, {before: replace, after: stop}))
        return found[-1]

    return function


def _with_calls(model: nnx.Module, wrappers: Mapping[str, Callable[..., Array]]) -> nnx.Module:
    """A copy of the model in which some layers call a function instead, which gets the layer."""
    copy = nnx.clone(model)
    for path, module in list(nnx.iter_modules(copy)):
        name = ".".join(map(str, path))
        if name in wrappers:
            kind = type(module)

            def run(self: Any, x: Array, *, name: str = name, kind: type = kind) -> Array:
                return wrappers[name](name, lambda given: kind.__call__(self, given), x)

            object.__setattr__(module, "__class__", type(kind.__name__, (kind,), {"__call__": run}))
    return copy


def _difference(
    function: Callable[[Array], Array],
    group: FiniteGroup,
    before: Representation,
    after: Representation,
    shape: tuple[int, ...],
    dtype: Any,
) -> float:
    """The largest relative ‖f(g x) − g f(x)‖ over the generators of the group."""
    x = jax.random.normal(jax.random.key(0), shape, dtype)
    y = function(x)
    largest = 0.0
    for element in group.generators:
        g = element.item() if np.ndim(element) == 0 else element
        moved = function(jax.vmap(lambda one, g=g: before(group, g, one))(x))
        expected = jax.vmap(lambda one, g=g: after(group, g, one))(y)
        scale = jnp.maximum(jnp.linalg.norm(expected), jnp.finfo(dtype).tiny)
        largest = max(largest, float(jnp.linalg.norm(moved - expected) / scale))
    return largest
