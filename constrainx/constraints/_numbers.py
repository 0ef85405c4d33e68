"""Numbers that users pass as arguments, checked and as plain Python numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

from constrainx.errors import ArgumentError

Schedule: TypeAlias = Callable[[Any], Any]


def as_count(value: Any, *, argument: str, least: int = 1, fix: str = "") -> int:
    """Returns an integer of at least ``least`` as an `int`, or raises an error.

    >>> as_count(np.int32(3), argument="Norm(groups=...)")
    3

    Args:
        value: an integer, from Python, NumPy or JAX.
        argument: its name, as the user knows it.
        least: the smallest value allowed.
        fix: a sentence to append to the error.
    """
    try:
        # A boolean is an integer to Python, but nobody means one.
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < least:
        raise ArgumentError(
            f"`{argument}` must be an integer of at least {least}, got {value!r}."
            f"{fix and ' ' + fix}"
        )
    return count


def as_number(value: Any, *, argument: str, least: float = -math.inf, fix: str = "") -> float:
    """Returns a finite number of at least ``least`` as a `float`, or raises an error.

    >>> as_number(np.float64(0.5), argument="MaskBudget(target=...)")
    0.5

    Args:
        value: a real number or an array without axes, from Python, NumPy or JAX.
        argument: its name, as the user knows it.
        least: the smallest value allowed.
        fix: a sentence to append to the error.
    """
    number = _to_float(value)
    if number is None or not math.isfinite(number) or number < least:
        bound = "" if math.isinf(least) else f" of at least {least:g}"
        raise ArgumentError(
            f"`{argument}` must be a finite number{bound}, got {value!r}.{fix and ' ' + fix}"
        )
    return number


def as_number_or_schedule(value: Any, *, argument: str) -> float | Schedule:
    """Returns γ or the like, a finite number of at least 0 or a schedule, or raises an error.

    >>> as_number_or_schedule(np.float32(0.5), argument="UnitNorm(gamma=...)")
    0.5

    Args:
        value: a number, or a function of the step.
        argument: its name, as the user knows it.
    """
    if callable(value):
        return value
    fix = "It may also be an Optax schedule."
    return as_number(value, argument=argument, least=0, fix=fix)


def _to_float(value: Any) -> float | None:
    # A value that is traced is not known yet, and a constraint is a constant under `jit`.
    if isinstance(value, bool | jax.core.Tracer) or np.ndim(value):
        return None
    if not np.issubdtype(np.asarray(value).dtype, np.number) and not _is_extended(value):
        return None
    try:
        return float(value)
    except TypeError:  # a complex number
        return None


def _is_extended(value: Any) -> bool:
    """Tells whether a value has a floating type that NumPy does not know, such as bfloat16."""
    return jax.numpy.issubdtype(np.asarray(value).dtype, jax.numpy.floating)
