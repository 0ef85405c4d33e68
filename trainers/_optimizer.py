"""What an Optax optimizer is made of, which it does not say by itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, TypeAlias

Setting: TypeAlias = bool | int | float | str | None


def describe_optimizer(optimizer: Any) -> dict[str, Setting]:
    """The settings of an optimizer, by the names of its transformations and of their arguments.

    Adam with another weight decay, or another learning rate, has a state of the same structure, so
    that a checkpoint alone cannot tell. Optax keeps what it was given in closures, and names,
    numbers and schedules are read from these. What cannot be read is left out.

    >>> import optax
    >>> found = describe_optimizer(optax.sgd(0.1, momentum=0.9))
    >>> found["trace.decay"], found["scale.step_size"]
    (0.9, -0.1)
    """
    found: dict[str, Setting] = {}
    counts: dict[str, int] = {}
    for name, settings in _walk(getattr(optimizer, "update", None), set()):
        counts[name] = counts.get(name, 0) + 1
        unique = name if counts[name] == 1 else f"{name} {counts[name]}"
        found |= {f"{unique}.{key}": value for key, value in settings.items()}
    return found


def _walk(function: Any, seen: set[int]) -> Iterator[tuple[str, dict[str, Setting]]]:
    """The factory of a function and what it was given, and the same of all functions in there."""
    if isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__") or id(function) in seen:
        return
    seen.add(id(function))
    settings: dict[str, Setting] = {}
    inner: list[Any] = []
    cells = function.__closure__ or ()
    for key, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # nothing was assigned to it yet
            continue
        if value is None or isinstance(value, bool | int | float | str):
            settings[key] = value
        else:
            inner += _find_functions(value)
    factory, is_closure, _ = function.__qualname__.partition(".<locals>")
    if is_closure and settings:
        yield factory, settings
    for one in inner:
        yield from _walk(one, seen)


def _find_functions(value: Any) -> list[Any]:
    """The functions that a closure holds: one, those of a transformation, or a list of either."""
    if callable(value):
        return [value]
    if isinstance(value, tuple) and hasattr(value, "update"):
        return [value.update]
    if isinstance(value, tuple | list):
        return [function for one in value for function in _find_functions(one)]
    if type(value) is dict:
        return [function for one in value.values() for function in _find_functions(one)]
    return []
