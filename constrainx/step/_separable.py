"""Which constraints have a row for each example that depends on no other example.

Rows on disjoint examples are cheap, see `_jacobian.py`. `Norm` has them by definition. Here they
are found where a residual is one number an example, as in ``reduce="none"`` on a scalar output: the
rows are traced for a batch of unknown length, and every operation must treat the axis of that
length example by example. Whatever is not known to do so leaves the constraint as it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.extend.core as jex
import jax.numpy as jnp

from constrainx.constraints import Composed, Member, find_live_inputs
from constrainx.step._method import Point


def separate_examples(point: Point, counts: Sequence[int], *, rows: range) -> Point:
    """The same point, where constraints that can have a slice of the batch for each row do.

    Args:
        point: where.
        counts: how many rows each constraint has.
        rows: how many rows are worth it.
    """
    keys = point.constraints.keys(point.key)
    members = []
    for member, key, count in zip(point.constraints, keys, counts, strict=True):
        is_open = member.slices is None and count in rows
        is_open = is_open and _count_examples(member.view(point.batch)) == count
        if is_open and _is_separable(member, point, key):
            member = dataclasses.replace(member, slices=_count_examples)
        members.append(member)
    return point._replace(constraints=Composed(tuple(members)))


def _count_examples(batch: Any) -> int:
    """The length of the first axis that all arrays of a batch share, or 0 if they do not."""
    leaves = jax.tree.leaves(batch)
    sizes = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else 0 for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else 0


def _is_separable(member: Member, point: Point, key: Any) -> bool:
    (length,) = jax.export.symbolic_shape("examples")
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((length, *jnp.shape(leaf)[1:]), jnp.result_type(leaf)),
        member.view(point.batch),
    )
    try:
        closed = jax.make_jaxpr(lambda p, b, k: member.function(p, b, k, point.model))(
            point.parameters, batch, key
        )
        (rows,) = closed.out_avals
        # A key is drawn from anew in each slice, which would be another sample.
        needs_key = find_live_inputs(closed)[-1]
        return rows.shape == (length,) and not needs_key and _keeps_apart(closed.jaxpr)
    except Exception:  # whatever a residual, or JAX, raises for a length that is not a number
        return False


def _keeps_apart(jaxpr: jex.Jaxpr, needed: Sequence[bool] | None = None) -> bool:
    """Whether no operation that the outputs depend on mixes examples."""
    wanted = [True] * len(jaxpr.outvars) if needed is None else needed
    live = {
        atom
        for atom, is_needed in zip(jaxpr.outvars, wanted, strict=True)
        if is_needed and not isinstance(atom, jex.Literal)
    }
    for equation in reversed(jaxpr.eqns):
        outputs = [variable in live for variable in equation.outvars]
        if not any(outputs):
            continue
        if not _treats_apart(equation, outputs):
            return False
        live |= {atom for atom in equation.invars if not isinstance(atom, jex.Literal)}
    return True


def _treats_apart(equation: jex.JaxprEqn, outputs: Sequence[bool]) -> bool:
    name, parameters = equation.primitive.name, equation.params
    match name:
        case "jit" | "pjit":
            return _keeps_apart(parameters["jaxpr"].jaxpr, outputs)
        case "remat2" | "remat" | "checkpoint":
            return _keeps_apart(parameters["jaxpr"], outputs)
        case "custom_jvp_call":
            return _keeps_apart(parameters["call_jaxpr"].jaxpr, outputs)
        case "cond":
            return all(_keeps_apart(branch.jaxpr) for branch in parameters["branches"])
        case "scan":
            # Not over the examples.
            return isinstance(parameters["length"], int) and _keeps_apart(parameters["jaxpr"].jaxpr)
    if any(isinstance(leaf, jex.Jaxpr | jex.ClosedJaxpr) for leaf in jax.tree.leaves(parameters)):
        return False  # who knows what is in it
    inputs = [_find_axis(atom.aval) for atom in equation.invars]
    results = [_find_axis(variable.aval) for variable in equation.outvars]
    found = {axis for axis in (*inputs, *results) if axis is not None}
    if not found:
        return name != "dim_as_value"  # the number of examples
    if None in results or MIXED in found:
        return False
    if set(inputs) <= {None}:
        return name == "broadcast_in_dim"  # the same for all examples
    if name in ELEMENTWISE or name in REDUCTIONS:
        return name in REDUCTIONS or len(found) == 1
    if name == "dot_general":
        return True  # two axes of examples would give one of each, or none
    return _moves_apart(equation, inputs, results[0])


def _moves_apart(equation: jex.JaxprEqn, inputs: Sequence[int | None], result: int | None) -> bool:
    """Whether an operation that moves entries takes the examples to where they belong."""
    parameters = equation.params
    operand: Any = equation.invars[0].aval
    out: Any = equation.outvars[0].aval
    axis = inputs[0]
    match equation.primitive.name:
        case "broadcast_in_dim":
            return axis is not None and parameters["broadcast_dimensions"][axis] == result
        case "reshape":
            before, after = operand.shape[:axis], out.shape[:result]
            return parameters["dimensions"] is None and math.prod(before) == math.prod(after)
        case "transpose":
            return result is not None and parameters["permutation"][result] == axis
        case "concatenate":
            return set(inputs) <= {None, result} and parameters["dimension"] != result
        case "stack":
            return set(inputs) == {axis} and result == axis + (parameters["axis"] <= axis)
        case "slice" | "squeeze":
            return True  # as many examples as before are all of them, in the same order
        case "pad":
            return axis == result and parameters["padding_config"][axis] == (0, 0, 0)
        case "rev":
            return axis not in parameters["dimensions"]
        case "cumsum" | "cumprod" | "cummax" | "cummin" | "cumlogsumexp":
            return axis != parameters["axis"]
        case "conv_general_dilated":
            layout = parameters["dimension_numbers"]
            first = (layout.lhs_spec[0], None, layout.out_spec[0])
            return (*inputs, result) == first and parameters["batch_group_count"] == 1
        case "gather":
            return _gathers_apart(equation, inputs, result)
    return False


def _gathers_apart(
    equation: jex.JaxprEqn, inputs: Sequence[int | None], result: int | None
) -> bool:
    """Whether a gather takes all examples along, or looks up something for each of them."""
    axis, indices = inputs
    numbers = equation.params["dimension_numbers"]
    operand: Any = equation.invars[0].aval
    out: Any = equation.outvars[0].aval
    if axis is None:  # a table, with an index for each example
        batched = [i for i in range(out.ndim) if i not in numbers.offset_dims]
        return indices is not None and batched[indices] == result
    if indices is None:  # some entries of each example
        kept = [
            i
            for i in range(operand.ndim)
            if i not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        ]
        offsets = dict(zip(kept, numbers.offset_dims, strict=True))
        return axis not in numbers.start_index_map and offsets.get(axis) == result
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    return (axis, indices) in pairs


# Stands for an array with several axes of examples, or with another number of them.
MIXED = -1


def _find_axis(array: Any) -> int | None:
    """The axis of examples, if there is one."""
    axes = [i for i, size in enumerate(array.shape) if not isinstance(size, int)]
    if not axes:
        return None
    return axes[0] if len(axes) == 1 and str(array.shape[axes[0]]) == "examples" else MIXED


REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
              "argmax", "argmin"}  # fmt: skip
ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type", "copy", "copy_p", "cos",
    "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge",
    "gt", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt",
    "max", "min", "mul", "name", "ne", "neg", "not", "optimization_barrier", "or", "pow", "real",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt",
    "square", "stop_gradient", "sub", "tan", "tanh", "xor",
}  # fmt: skip
