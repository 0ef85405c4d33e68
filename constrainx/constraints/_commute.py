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

# How far weights that the constraint does not hold are moved before the network is tested.
AWAY = 0.3


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

    Each layer is tested by itself, what stands between two layers from the output of one to the
    input of the next, and what follows the last layer if it returns an array of as many channels,
    all on random arrays of the shapes that ``call`` gives them. Weights and statistics of other
    layers are moved at random first: a norm whose scales are all one commutes, and after a step of
    training it no longer does.

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
        shape, dtype = seen.input.shape, seen.input.dtype
        try:
            difference = _difference(
                modules[seen.path], group, layer.input, layer.output, shape, dtype
            )
        except ArgumentError as error:
            raise ArgumentError(
                f"the layer {seen.path!r} does not commute with {group} on inputs of shape "
                f"{shape[1:]}: {error}"
            ) from error
        if difference > rtol:
            raise ArgumentError(
                f"the layer {seen.path!r} does not commute with {group} on inputs of shape "
                f"{shape[1:]} (relative difference {difference:.1e}): its stride or "
                "padding breaks the symmetry. Choose them so that the windows of an image and of "
                "the rotated image are the same."
            )
    moved = _move_others(model, set(layers))
    for before, after in itertools.zip_longest(calls, calls[1:]):
        last = layers[before.path].output
        if after is None:
            between, result = _between(moved, call, before.path, None), last
            shape = jax.eval_shape(between, before.output).shape
            if len(shape) != before.output.ndim or shape[-1] != before.output.shape[-1]:
                continue
            where = f"what follows the layer {before.path!r}"
        else:
            between = _between(moved, call, before.path, after.path)
            result = layers[after.path].input
            where = f"what stands between the layers {before.path!r} and {after.path!r}"
        shape, dtype = before.output.shape, before.output.dtype
        difference = _difference(between, group, last, result, shape, dtype)
        if difference > rtol:
            guilty = _find_guilty(moved, call, group, layers, before.path, rtol=rtol)
            raise ArgumentError(
                f"{where} does not commute with {group} (relative difference {difference:.1e})"
                f"{guilty}: pooling must tile the image evenly, and norms and activations must "
                "treat the channels of a block alike, in training as well, so that a norm must not "
                "have a scale, a bias or statistics for each channel."
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


def _move_others(model: nnx.Module, held: set[str]) -> nnx.Module:
    """A copy in which all weights and statistics of layers that are not held are others."""
    copy, rng = nnx.clone(model), np.random.default_rng(0)
    for path, module in nnx.iter_modules(copy):
        if ".".join(map(str, path)) in held:
            continue
        for variable in vars(module).values():
            if isinstance(variable, nnx.Param | nnx.BatchStat) and _is_array(variable):
                value = variable[...]
                # By factors, so that a variance stays above zero; and zeros must move, too.
                factor = np.exp(AWAY * rng.normal(size=value.shape))
                shift = AWAY * rng.random(value.shape)
                variable.set_value((factor * value + shift).astype(value.dtype))
    return copy


def _is_array(variable: nnx.Variable) -> bool:
    value = variable.get_value()
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def _find_guilty(
    model: nnx.Module,
    call: Callable[[Any], Any],
    group: FiniteGroup,
    layers: Mapping[str, Any],
    before: str,
    *,
    rtol: float,
) -> str:
    """Names the modules behind a layer that do not commute by themselves, or nothing."""
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    inner = {
        path
        for path in modules
        if path and (path in layers or not any(p.startswith(f"{path}.") for p in modules))
    }
    calls = record_calls(model, call, inner)
    representation, found, is_behind = layers[before].output, [], False
    for seen in calls:
        if seen.path in layers:
            if is_behind:
                break
            is_behind = seen.path == before
        elif is_behind and seen.input.shape[-1] == seen.output.shape[-1]:
            difference = _difference(
                modules[seen.path],
                group,
                representation,
                representation,
                seen.input.shape,
                seen.input.dtype,
            )
            if difference > rtol:
                found.append(f"{seen.path!r}, a {type(modules[seen.path]).__name__}")
    return f", because of {' and '.join(found)}" if found else ""


def _between(
    model: nnx.Module, call: Callable[[Any], Any], before: str, after: str | None
) -> Callable[[Array], Array]:
    """What the network computes from the output of one layer to the input of another, or on."""

    def function(x: Array) -> Array:
        found: list[Array] = []

        def replace(path: str, layer: Callable[..., Array], given: Array) -> Array:
            del path
            return x.astype(layer(given).dtype)

        def stop(path: str, layer: Callable[..., Array], given: Array) -> Array:
            del path
            found.append(given)
            return layer(given)

        stops = {} if after is None else {after: stop}
        result = call(_with_calls(model, {before: replace, **stops}))
        return result if after is None else found[-1]

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
