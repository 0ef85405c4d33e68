"""Finds out, while tracing, whether a function is linear: follows its operations one by one.

Each variable is one of six things as a function of v, and a variable computed from several is what
`_join` makes of theirs. What no rule here knows is left to JAX's derivative, see `check_linear`.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval
from jaxtyping import PyTree

from constrainx.errors import ArgumentTypeError
from constrainx.linalg._vector import Vector

ADVICE = (
    "`lstsq` needs matvec(v, *args) to be linear in `v`, as A @ v is. For the Jacobian of a "
    "non-linear function f at x, pass `lambda v: jax.jvp(f, (x,), (v,))[1]`; for an affine "
    "function, subtract its value at zero and move that to `b`."
)
NOT_LINEAR = "`matvec` is not linear in its first argument"


class Linearity(enum.IntFlag):
    """What a variable is as a function of v; of several, the union of their bits, see `_join`."""

    ZERO = 0
    CONSTANT = 1
    LINEAR = 2
    AFFINE = 3
    UNKNOWN = 4
    STEPS = 8
    # A constant whose value is not known while tracing: it may well be zero, as the tangents are
    # that `jax.linearize` puts beside those that move.
    UNSURE = 16


def check_linear(
    closed: jex.ClosedJaxpr, matvec: Callable[[Vector], Vector], columns: PyTree, rows: PyTree
) -> bool:
    """Raises a TypeError if ``matvec`` is not linear; returns whether ``closed``, its jaxpr, is.

    Where an operation is not known here, the derivative of ``matvec`` says more: if that depends on
    v, ``matvec`` is not linear. If it does not, ``matvec`` is affine, unless it has steps in it or
    a derivative of its own that is wrong, and only numbers can tell.
    """
    verdict = _join(_follow(closed, [Linearity.LINEAR] * len(closed.jaxpr.invars)))
    is_sure = not verdict & Linearity.UNSURE
    verdict &= ~Linearity.UNSURE
    if verdict <= Linearity.AFFINE and verdict & Linearity.CONSTANT:
        raise ArgumentTypeError(
            f"{NOT_LINEAR}: it adds a constant, so that matvec(0) is not 0. {ADVICE}"
        )
    if verdict & Linearity.STEPS:
        raise ArgumentTypeError(
            f"{NOT_LINEAR}: its result depends on a comparison, a rounding, an integer or a "
            f"`stop_gradient` made from `v`. {ADVICE}"
        )
    if verdict & Linearity.UNKNOWN and _derivative_moves(matvec, columns, rows):
        raise ArgumentTypeError(
            f"{NOT_LINEAR}: its derivative is not the same everywhere. {ADVICE}"
        )
    return is_sure and not verdict & Linearity.UNKNOWN


def has_custom_vjp(jaxpr: jex.Jaxpr) -> bool:
    """Whether there is a `jax.custom_vjp` in it, which has no derivative in forward mode."""
    return any(
        equation.primitive.name == "custom_vjp_call"
        or any(has_custom_vjp(inner) for inner in _inner_jaxprs(equation))
        for equation in jaxpr.eqns
    )


def _inner_jaxprs(equation: jex.JaxprEqn) -> list[jex.Jaxpr]:
    leaves = jax.tree.leaves(
        list(equation.params.values()),
        is_leaf=lambda leaf: isinstance(leaf, jex.Jaxpr | jex.ClosedJaxpr),
    )
    opened = [leaf.jaxpr if isinstance(leaf, jex.ClosedJaxpr) else leaf for leaf in leaves]
    return [leaf for leaf in opened if isinstance(leaf, jex.Jaxpr)]


def _derivative_moves(matvec: Callable[[Vector], Vector], columns: PyTree, rows: PyTree) -> bool:
    def pullback(v: Vector, u: Vector) -> Vector:
        return jax.vjp(matvec, v)[1](u)

    try:
        jaxpr = jax.make_jaxpr(pullback)(columns, rows).jaxpr
    except Exception as error:
        raise ArgumentTypeError(
            f"{NOT_LINEAR}, or JAX cannot transpose it. {ADVICE} "
            f"JAX says: {type(error).__name__}: {str(error).strip() or 'no message'}"
        ) from error
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return any(used[: len(jax.tree.leaves(columns))])


def _join(parts: Sequence[Linearity]) -> Linearity:
    return functools.reduce(operator.or_, parts, Linearity.ZERO)


# --- One equation ---------------------------------------------------------------------------------

# Linear in all operands together.
_ADDITIVE = frozenset(
    [
        "add", "sub", "add_any", "concatenate", "stack", "pad", "complex", "neg", "reshape",
        "broadcast_in_dim", "transpose", "squeeze", "expand_dims", "slice", "rev", "split",
        "unstack", "tile", "copy", "copy_p", "real", "imag", "conj", "reduce_sum", "cumsum",
        "reduce_window_sum", "reduce_precision", "fft", "convert_element_type", "device_put",
        "optimization_barrier", "sharding_constraint", "layout_constraint", "psum",
        "psum_invariant", "pvary", "pbroadcast", "all_gather", "all_gather_invariant",
        "all_to_all", "ppermute", "reduce_scatter",
    ]
)  # fmt: skip
# Of these, and of some below, what only puts operands in their places.
_PLACING = frozenset(
    [
        "concatenate", "stack", "pad", "reshape", "broadcast_in_dim", "transpose", "squeeze",
        "expand_dims", "slice", "rev", "split", "unstack", "tile", "copy", "copy_p",
        "convert_element_type", "sharding_constraint", "select_n", "scatter",
        "dynamic_update_slice",
    ]
)  # fmt: skip
# Linear in these operands together, as long as the others stay put.
_LINEAR_IN = {
    "scatter": (0, 2), "scatter-add": (0, 2), "scatter-sub": (0, 2), "dynamic_update_slice": (0, 1),
    "gather": (0,), "dynamic_slice": (0,), "div": (0,), "triangular_solve": (1,),
}  # fmt: skip
_BILINEAR = frozenset(["mul", "dot_general", "conv_general_dilated", "ragged_dot_general"])
_STEPS = frozenset(["floor", "ceil", "round", "sign", "nextafter", "stop_gradient"])
_CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "checkpoint": "jaxpr", "remat2": "jaxpr", "remat": "jaxpr", "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr", "shard_map": "jaxpr",
}  # fmt: skip


def _follow(closed: jex.ClosedJaxpr, inputs: Sequence[Linearity]) -> list[Linearity]:
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= {
        var: _of_value(value) for var, value in zip(jaxpr.constvars, closed.consts, strict=True)
    }

    def read(atom: Any) -> Linearity:
        return _of_value(atom.val) if isinstance(atom, jex.Literal) else known[atom]

    for equation in jaxpr.eqns:
        results = _apply(equation, [read(atom) for atom in equation.invars])
        for var, result in zip(equation.outvars, results, strict=True):
            # No step is linear, and an integer, such as a comparison or an index, is a step.
            is_step = result > Linearity.CONSTANT and not jnp.issubdtype(
                var.aval.dtype, jnp.inexact
            )
            known[var] = Linearity.STEPS if is_step else result
    return [read(atom) for atom in jaxpr.outvars]


def _of_value(value: Any) -> Linearity:
    if isinstance(value, jax.core.Tracer) and jnp.issubdtype(value.dtype, jnp.inexact):
        return Linearity.UNSURE
    if isinstance(value, jax.core.Tracer) or jax.dtypes.issubdtype(
        jnp.result_type(value), jax.dtypes.extended
    ):
        return Linearity.CONSTANT
    return Linearity.CONSTANT if np.any(np.asarray(value)) else Linearity.ZERO


def _apply(equation: jex.JaxprEqn, parts: list[Linearity]) -> Sequence[Linearity]:
    name, count = equation.primitive.name, len(equation.outvars)
    if name in _CALLS:
        return _follow(_close(equation.params[_CALLS[name]]), parts)
    if name == "cond":
        return _follow_cond(equation, parts)
    if name == "scan":
        return _follow_scan(equation, parts)
    if name in ("device_put", "optimization_barrier") and len(parts) == count:
        return parts
    return [_of_operands(equation, name, parts)] * count


def _of_operands(equation: jex.JaxprEqn, name: str, parts: list[Linearity]) -> Linearity:
    if name not in _PLACING:
        # Whoever adds a constant means to.
        parts = [Linearity.CONSTANT if part == Linearity.UNSURE else part for part in parts]
    everything = _join(parts)
    if name in _LINEAR_IN:
        return _with_fixed(parts, _LINEAR_IN[name])
    if name in _ADDITIVE:
        return everything
    if name == "select_n":
        return _with_fixed(parts, range(1, len(parts)))
    if name in _BILINEAR:
        smaller, larger = sorted(parts[:2])
        if smaller <= Linearity.CONSTANT:
            return smaller and larger
        return _unless_fixed(everything)
    if name == "custom_linear_solve":
        right = len(equation.invars) - sum(equation.params["const_lengths"])
        return _with_fixed(parts, range(len(parts) - right, len(parts)))
    if name in _STEPS:
        return Linearity.STEPS if everything > Linearity.CONSTANT else everything
    return _unless_fixed(everything)


def _with_fixed(parts: Sequence[Linearity], linear_in: Sequence[int]) -> Linearity:
    """The result of an operation that is linear in these operands if the others are constant."""
    others = _join([part for i, part in enumerate(parts) if i not in linear_in])
    together = _join([parts[i] for i in linear_in])
    if others <= Linearity.CONSTANT:
        return together
    return _unless_fixed(others | together)


def _unless_fixed(everything: Linearity) -> Linearity:
    """The result of an unknown operation: constant if its operands are, else unknown."""
    if everything <= Linearity.CONSTANT:
        return Linearity.CONSTANT
    return (everything & Linearity.STEPS) | Linearity.UNKNOWN


# --- Control flow ---------------------------------------------------------------------------------


def _close(jaxpr: Any) -> jex.ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jex.ClosedJaxpr(jaxpr, ())


def _follow_cond(equation: jex.JaxprEqn, parts: list[Linearity]) -> list[Linearity]:
    index, operands = parts[0], parts[1:]
    branches = [_follow(branch, operands) for branch in equation.params["branches"]]
    results = [_join(outcomes) for outcomes in zip(*branches, strict=True)]
    if index <= Linearity.CONSTANT:
        return results
    return [index | Linearity.UNKNOWN] * len(results)


def _follow_scan(equation: jex.JaxprEqn, parts: list[Linearity]) -> list[Linearity]:
    """Repeats the body until the carry no longer changes. It ends, because joins only add bits."""
    first, count = equation.params["num_consts"], equation.params["num_carry"]
    constants, carry, rest = parts[:first], parts[first : first + count], parts[first + count :]
    while True:
        results = _follow(equation.params["jaxpr"], [*constants, *carry, *rest])
        joined = [_join(pair) for pair in zip(carry, results[:count], strict=True)]
        if joined == carry:
            return results
        carry = joined
