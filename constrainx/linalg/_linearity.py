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
    _follow(closed, [True] * len(closed.jaxpr.invars), zeros=set())


def _is_zero(value: Any) -> bool:
    if isinstance(value, jax.core.Tracer) or jax.dtypes.issubdtype(
        value.dtype, jax.dtypes.extended
    ):
        return False
    return not np.any(np.asarray(value))


_SHAPE_ONLY = {"broadcast_in_dim", "reshape", "convert_element_type", "copy", "transpose", "neg"}


def _follow(closed: jex.ClosedJaxpr, moves: Sequence[bool], zeros: set[Any]) -> list[bool]:
    """Follows which variables move with v; raises where a constant is added to one that does.

    Adding zero is fine, so ``zeros`` collects the variables that are known to be zero.
    """
    jaxpr = closed.jaxpr
    moving = {var for var, flag in zip(jaxpr.invars, moves, strict=True) if flag}
    zeros |= {
        var for var, value in zip(jaxpr.constvars, closed.consts, strict=True) if _is_zero(value)
    }

    def is_moving(atom: Any) -> bool:
        return not isinstance(atom, jex.Literal) and atom in moving

    def is_zero(atom: Any) -> bool:
        return _is_zero(np.asarray(atom.val)) if isinstance(atom, jex.Literal) else atom in zeros

    for equation in jaxpr.eqns:
        name = equation.primitive.name
        flags = [is_moving(atom) for atom in equation.invars]
        if not any(flags):
            if name in _SHAPE_ONLY and is_zero(equation.invars[0]):
                zeros.update(equation.outvars)
            continue
        if name in ("add", "sub", "add_any") and not all(flags):
            other = equation.invars[flags.index(False)]
            if not is_zero(other):
                raise TypeError(
                    "`matvec` is not linear in its first argument: it adds a constant "
                    f"{other.aval}, so that matvec(0) is not 0. {_ADVICE}"
                )
        inner = _body(equation)
        if inner is None:
            moving.update(equation.outvars)
            continue
        inner_zeros = {
            var
            for atom, var in zip(equation.invars, inner.jaxpr.invars, strict=True)
            if is_zero(atom)
        }
        results = _follow(inner, flags, inner_zeros)
        moving.update(v for v, flag in zip(equation.outvars, results, strict=True) if flag)
    return [is_moving(atom) for atom in jaxpr.outvars]


def _body(equation: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The body of a call whose arguments are the equation's own, such as a nested `jax.jit`."""
    for key in ("jaxpr", "call_jaxpr"):
        inner = equation.params.get(key)
        if isinstance(inner, jex.Jaxpr) and not inner.constvars:
            inner = jex.ClosedJaxpr(inner, ())
        if (
            isinstance(inner, jex.ClosedJaxpr)
            and equation.primitive.name != "scan"
            and len(inner.jaxpr.invars) == len(equation.invars)
            and len(inner.jaxpr.outvars) == len(equation.outvars)
        ):
            return inner
    return None
