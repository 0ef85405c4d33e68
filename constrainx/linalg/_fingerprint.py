"""A hashable key that is equal for equal jaxprs, so that compiled solves are reused.

JAX compiles again whenever it meets a new jaxpr, and `lstsq` traces a new one at every call.
Without this, each call outside of `jax.jit` would pay for a compilation.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax.extend.core as jex
import numpy as np


def fingerprint(jaxpr: jex.ClosedJaxpr) -> Hashable:
    """A key of a program. Equal keys mean equal programs; where that is unsure, keys differ."""
    try:
        key = _of_closed(jaxpr)
        hash(key)
    except TypeError:
        return object()
    return key


def _of_closed(closed: jex.ClosedJaxpr) -> Hashable:
    # Arrays inside a jaxpr have no cheap value to compare.
    return object() if closed.consts else _of(closed.jaxpr)


def _of(jaxpr: jex.Jaxpr) -> Hashable:
    numbers: dict[Any, int] = {}

    def name(atom: Any) -> Hashable:
        if isinstance(atom, jex.Literal):
            return "literal", atom.aval, _of_value(atom.val)
        return numbers.setdefault(atom, len(numbers)), atom.aval

    def names(atoms: Any) -> Hashable:
        return tuple(map(name, atoms))

    return (
        names(jaxpr.constvars),
        names(jaxpr.invars),
        tuple(
            (
                equation.primitive,
                names(equation.invars),
                names(equation.outvars),
                tuple((key, _of_value(value)) for key, value in sorted(equation.params.items())),
            )
            for equation in jaxpr.eqns
        ),
        names(jaxpr.outvars),
    )


def _of_value(value: Any) -> Hashable:
    if isinstance(value, jex.ClosedJaxpr):
        return _of_closed(value)
    if isinstance(value, jex.Jaxpr):
        return _of(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_of_value, value))
    if isinstance(value, int | float | np.generic | np.ndarray):
        # Not by value: 0.0 equals -0.0 and 1 equals True, but they are not the same program.
        array = np.asarray(value)
        return type(value), array.dtype, array.shape, array.tobytes()
    return type(value), value
