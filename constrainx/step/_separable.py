"""Which constraints have rows for each example that depend on no other example.

Rows on disjoint examples are cheap, see `_jacobian.py`. `Norm` has them by definition. Here they
are found where a residual has one or several numbers an example, as in ``reduce="none"`` on the
outputs of a network: the rows are traced for a batch of unknown length, and every operation must
treat the axis of that length example by example. Whatever is not known to do so leaves the
constraint as it was.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import PyTree

from constrainx.constraints import Member, find_live_inputs
from constrainx.step._method import Point


class Apart(NamedTuple):
    """Rows that depend on one piece of the batch each.

    Attributes:
        pieces: how many pieces there are: examples, or groups of them.
        outputs: how many rows a piece has, for each array of the residual.
        is_cut: for each array of the batch, whether it has the examples along its first axis; the
            others are not read.
    """

    pieces: int
    outputs: tuple[int, ...]
    is_cut: tuple[bool, ...]


def find_apart(member: Member, point: Point, key: Any, *, count: int) -> Apart | None:
    """How the rows of a constraint can be taken apart, or None if they cannot.

    Args:
        member: the constraint.
        point: where.
        key: of the constraint.
        count: how many rows it has.
    """
    batch = member.view(point.batch, key, point.model)
    leaves, tree = jax.tree.flatten(batch)
    if member.slices is not None:
        return Apart(member.slices(batch), (1,), (True,) * len(leaves))
    closed = _trace(member, point, batch, key)
    after = len(closed.in_avals) - len(jax.tree.leaves(key))
    live = find_live_inputs(closed)[after - len(leaves) :]
    # A key is drawn from anew in each piece, which would be another sample.
    if any(live[len(leaves) :]):
        return None
    sizes = [jnp.shape(leaf)[0] if jnp.ndim(leaf) else 0 for leaf in leaves]
    read = {size for size, is_read in zip(sizes, live, strict=False) if is_read}
    examples = read.pop() if len(read) == 1 else 0
    if not examples or count % examples:
        return None
    is_cut = tuple(size == examples for size in sizes)
    (length,) = jax.export.symbolic_shape("examples")
    symbolic = [
        jax.ShapeDtypeStruct((length, *jnp.shape(leaf)[1:]), jnp.result_type(leaf)) if cut else leaf
        for leaf, cut in zip(leaves, is_cut, strict=True)
    ]
    try:
        closed = _trace(member, point, jax.tree.unflatten(tree, symbolic), key)
        jaxpr = _find_arrays(closed.jaxpr)
        outputs = [_count_rows(variable.aval) for variable in jaxpr.outvars]
        is_apart = None not in outputs and _keeps_apart(jaxpr)
    except Exception:  # whatever a residual, or JAX, raises for a length that is not a number
        return None
    sizes = [size for size in outputs if size is not None]
    return Apart(examples, tuple(sizes), is_cut) if is_apart else None


def cut_apart(batch: PyTree, apart: Apart) -> tuple[list[Any], Any]:
    """The arrays of a batch that have the examples, and a function that puts it together again."""
    leaves, tree = jax.tree.flatten(batch)

    def restore(cut: Sequence[Any]) -> PyTree:
        rest = iter(cut)
        filled = [
            next(rest) if is_cut else leaf
            for leaf, is_cut in zip(leaves, apart.is_cut, strict=True)
        ]
        return jax.tree.unflatten(tree, filled)

    return [leaf for leaf, is_cut in zip(leaves, apart.is_cut, strict=True) if is_cut], restore


def _trace(member: Member, point: Point, batch: Any, key: Any) -> jex.ClosedJaxpr:
    return jax.make_jaxpr(lambda p, b, k: member.function(p, b, k, point.model))(
        point.parameters, batch, key
    )


def _find_arrays(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    """The rows before those of several arrays were put one below the other."""
    (rows,) = jaxpr.outvars
    if not jaxpr.eqns or jaxpr.eqns[-1].outvars != [rows]:
        return jaxpr
    last = jaxpr.eqns[-1]
    if last.primitive.name != "concatenate":
        return jaxpr
    return jaxpr.replace(
        eqns=jaxpr.eqns[:-1],
        outvars=list(last.invars),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def _count_rows(array: Any) -> int | None:
    """How many rows an example has in a vector of rows; None if it is not one."""
    return _count_parts(array.shape[0]) if len(array.shape) == 1 else None


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
    if name == "reshape":
        return _reshapes_apart(equation, inputs[0], results[0])
    if len(_list_lengths(equation)) > 1:
        return False  # some entries of an example, or some examples, were left out
    if name in ELEMENTWISE or name in REDUCTIONS:
        return name in REDUCTIONS or len(found) == 1
    if name == "dot_general":
        return True  # two axes of examples would give one of each, or none
    if name == "split":
        return set(inputs) == found and parameters["axis"] not in found
    return _moves_apart(equation, inputs, results[0])


def _reshapes_apart(equation: jex.JaxprEqn, inputs: int | None, result: int | None) -> bool:
    """Whether all entries of an example stay together, before those of the next.

    An axis of c entries for each example is what becomes of examples and tokens as one axis.
    """
    operand: Any = equation.invars[0].aval
    out: Any = equation.outvars[0].aval
    if equation.params["dimensions"] is not None:
        return False
    return math.prod(operand.shape[:inputs]) == math.prod(out.shape[:result])


def _moves_apart(equation: jex.JaxprEqn, inputs: Sequence[int | None], result: int | None) -> bool:
    """Whether an operation that moves entries takes the examples to where they belong."""
    parameters = equation.params
    axis = inputs[0]
    match equation.primitive.name:
        case "broadcast_in_dim":
            return axis is not None and parameters["broadcast_dimensions"][axis] == result
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
    """The axis of examples, or of a few entries for each example, if there is one."""
    axes = [i for i, size in enumerate(array.shape) if not isinstance(size, int)]
    if not axes:
        return None
    return axes[0] if len(axes) == 1 and _count_parts(array.shape[axes[0]]) else MIXED


def _count_parts(size: Any) -> int | None:
    """How many entries an axis has for each example; None if it has no such number."""
    found = re.fullmatch(r"(?:(\d+)\*)?examples", str(size))
    return int(found[1] or 1) if found else None


def _list_lengths(equation: jex.JaxprEqn) -> set[str]:
    """The lengths of the axes of examples."""
    arrays: list[Any] = [atom.aval for atom in (*equation.invars, *equation.outvars)]
    axes = [(array, _find_axis(array)) for array in arrays]
    return {str(array.shape[axis]) for array, axis in axes if axis is not None}


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
