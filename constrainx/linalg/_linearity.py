"""Finds out, while tracing, whether a function is linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jaxtyping import PyTree

from constrainx.linalg._vector import Vector

_ADVICE = (
    "`lstsq` needs matvec(v, *args) to be linear in `v`, as A @ v is. For the Jacobian of a "
    "non-linear function f at x, pass `lambda v: jax.jvp(f, (x,), (v,))[1]`; for an affine "
    "function, subtract its value at zero and move that to `b`."
)


def check_linear(matvec: Callable[[Vector], Vector], columns: PyTree, rows: PyTree) -> None:
    """Raises a TypeError unless ``matvec`` is linear, as far as its operations show.

    A function that JAX can transpose is affine; one that adds no constant on the way is linear.
    """
    try:
        jax.eval_shape(jax.linear_transpose(matvec, columns), rows)
    except Exception as error:
        raise TypeError(
            f"`matvec` is not linear in its first argument, or JAX cannot transpose it. {_ADVICE} "
            f"JAX says: {type(error).__name__}: {str(error).strip() or 'no more than that'}"
        ) from error

    closed = jax.make_jaxpr(matvec)(columns)
    constants = _Constants(closed.jaxpr.constvars, closed.consts)
    _follow(closed.jaxpr, [True] * len(closed.jaxpr.invars), constants)


class _Constants:
    """The values that are known while tracing, to tell adding zero from adding something."""

    def __init__(self, variables: Sequence[Any], values: Sequence[Any]):
        self.zeros = {var for var, value in zip(variables, values, strict=True) if _is_zero(value)}

    def is_zero(self, atom: Any) -> bool:
        if isinstance(atom, jex.Literal):
            return not np.any(np.asarray(atom.val))
        return atom in self.zeros


def _is_zero(value: Any) -> bool:
    if isinstance(value, jax.core.Tracer) or jax.dtypes.issubdtype(
        value.dtype, jax.dtypes.extended
    ):
        return False
    return not np.any(np.asarray(value))


_SHAPE_ONLY = {"broadcast_in_dim", "reshape", "convert_element_type", "copy", "transpose", "neg"}


def _follow(jaxpr: jex.Jaxpr, moves: Sequence[bool], constants: _Constants) -> list[bool]:
    """Follows which variables move with v; raises where a constant is added to one that does."""
    moving = {var for var, flag in zip(jaxpr.invars, moves, strict=True) if flag}

    def is_moving(atom: Any) -> bool:
        return not isinstance(atom, jex.Literal) and atom in moving

    for equation in jaxpr.eqns:
        name = equation.primitive.name
        flags = [is_moving(atom) for atom in equation.invars]
        if not any(flags):
            if name in _SHAPE_ONLY and constants.is_zero(equation.invars[0]):
                constants.zeros.update(equation.outvars)
            continue
        if name in ("add", "sub", "add_any") and not all(flags):
            other = equation.invars[flags.index(False)]
            if not constants.is_zero(other):
                raise TypeError(
                    "`matvec` is not linear in its first argument: it adds a constant "
                    f"{other.aval}, so that matvec(0) is not 0. {_ADVICE}"
                )
        inner = _inner_jaxpr(equation)
        if inner is None:
            moving.update(equation.outvars)
            continue
        for outer_atom, inner_var in zip(equation.invars, inner.invars, strict=True):
            if constants.is_zero(outer_atom):
                constants.zeros.add(inner_var)
        results = _follow(inner, flags, constants)
        moving.update(v for v, flag in zip(equation.outvars, results, strict=True) if flag)
    return [is_moving(atom) for atom in jaxpr.outvars]


def _inner_jaxpr(equation: jex.JaxprEqn) -> jex.Jaxpr | None:
    """The body of a call whose arguments are the equation's own, such as a nested `jax.jit`."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = equation.params.get(key)
        inner = getattr(inner, "jaxpr", inner)
        if (
            isinstance(inner, jex.Jaxpr)
            and not inner.constvars
            and equation.primitive.name != "scan"
            and len(inner.invars) == len(equation.invars)
            and len(inner.outvars) == len(equation.outvars)
        ):
            return inner
    return None
