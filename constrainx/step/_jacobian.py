"""The Jacobian of a few scalar rows, in a form that makes their inner products cheap.

If each row depends on its own slice of the batch, one backward pass gives the gradients of all; if
each slice has k rows, k passes do.
Through a dense layer these gradients have factors, see `_blocks.py`. A convolution is a dense layer
on patches, with a token for each position; its kernel is small, so the sums are carried out. Where
neither is possible, or not worth it, the rows' gradients are stored as JAX computes them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from constrainx.constraints import find_live_inputs
from constrainx.linalg import Vector
from constrainx.step._blocks import (
    Absent,
    Block,
    Factored,
    Stored,
    combine,
    correlate,
    materialise,
    multiply,
)
from constrainx.step._patches import kernel_gradients
from constrainx.step._row_order import RowOrder
from constrainx.step._taps import (
    count_entries,
    find_taps,
    is_convolution,
    is_worth_factoring,
    run_with_taps,
)

Slice: TypeAlias = Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "blocks"],
    meta_fields=["tree", "movable", "order"],
)
@dataclasses.dataclass(frozen=True)
class RowJacobian:
    """The rows of one constraint: the values c and the Jacobian J, a block for each parameter.

    Attributes:
        values: c.
        blocks: in the order of the parameters' leaves.
        tree: the structure of the parameters.
        movable: which parameters the rows may move, P; None for all. The others still move the
            rows, so that they count in J u.
        order: of rows that were computed example by example; None for the order of the blocks.
    """

    values: Array  # or its shape alone, so that the annotation says no more
    blocks: tuple[Block, ...]
    tree: Any
    movable: tuple[bool, ...] | None = None
    order: RowOrder | None = None

    def can_move(self, index: int) -> bool:
        """Whether the rows may move a parameter."""
        return self.movable is None or self.movable[index]

    def matvec(self, update: Vector, *, movable_alone: bool = False) -> Float[Array, " rows"]:
        """J u, or J P u with ``movable_alone``."""
        leaves = self.tree.flatten_up_to(update)
        parts = [
            multiply(block, leaf)
            for index, (block, leaf) in enumerate(zip(self.blocks, leaves, strict=True))
            if not movable_alone or self.can_move(index)
        ]
        return self.sort(_add(parts, jnp.zeros_like(self.values)))

    def sort(self, rows: Float[Array, "rows ..."]) -> Float[Array, "rows ..."]:
        """Rows in the order of the blocks, brought into that of the values."""
        permutation = None if self.order is None else self.order.permutation
        return rows if permutation is None else rows[permutation]

    def rmatvec(self, weights: Float[Array, " rows"]) -> list[Array | None]:
        """P Jᵀλ, leaf by leaf; None for a parameter that it does not move."""
        inverse = None if self.order is None else self.order.inverse
        weights = weights if inverse is None else weights[inverse]
        return [
            combine(block, weights) if self.can_move(index) else None
            for index, block in enumerate(self.blocks)
        ]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class StackedJacobian:
    """The rows of several constraints on the same parameters, one below the other.

    The blocks of each stay what they are. With P for what each row may move, the Gram matrix is
    G = J P Jᵀ. It is symmetric if all rows that share a parameter agree on whether it may move. If
    they do not, J P v needs another one than J v, (J P)(J P)ᵀ, which is always symmetric.
    """

    parts: tuple[RowJacobian, ...]

    @property
    def values(self) -> Float[Array, " rows"]:
        """The values of all rows."""
        return jnp.concatenate([part.values for part in self.parts])

    @property
    def is_symmetric(self) -> bool:
        """Whether the Gram matrix is, for any values."""
        return all(
            first.can_move(index) == second.can_move(index)
            for first in self.parts
            for second in self.parts
            for index in range(len(first.blocks))
            if not isinstance(first.blocks[index], Absent)
            and not isinstance(second.blocks[index], Absent)
        )

    def matvec(self, update: Vector, *, movable_alone: bool = False) -> Float[Array, " rows"]:
        """J u, or J P u with ``movable_alone``."""
        return jnp.concatenate(
            [part.matvec(update, movable_alone=movable_alone) for part in self.parts]
        )

    def rmatvec(self, weights: Float[Array, " rows"], like: Vector) -> Vector:
        """P Jᵀλ."""
        leaves, tree = jax.tree.flatten(like)
        totals: list[Array] = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
        ends = _cumulate([len(part.values) for part in self.parts])
        by_part = [
            part.rmatvec(weights[start:end])
            for part, (start, end) in zip(self.parts, ends, strict=True)
        ]
        totals = [
            _add([change[index] for change in by_part], zero) for index, zero in enumerate(totals)
        ]
        return jax.tree.unflatten(tree, totals)

    def gram(
        self, metric: Vector | None = None, *, movable_alone: bool = False
    ) -> Float[Array, "rows rows"]:
        """J P D Jᵀ with a diagonal metric D, or (J P) D (J P)ᵀ with ``movable_alone``."""
        weights = None if metric is None else self.parts[0].tree.flatten_up_to(metric)
        symmetric = movable_alone or self.is_symmetric
        rows: list[list[Array]] = []
        for i, first in enumerate(self.parts):
            rows.append([])
            for j, second in enumerate(self.parts):
                if symmetric and j < i:
                    rows[i].append(rows[j][i].T)
                else:
                    found = _correlate_rows(first, second, weights, movable_alone=movable_alone)
                    rows[i].append(found)
        return jnp.concatenate([jnp.concatenate(row, axis=1) for row in rows])

    def materialise(self, like: Vector) -> Float[Array, "rows parameters"]:
        """The dense Jacobian, for tests and small problems."""
        leaves = jax.tree.leaves(like)
        dense = []
        for part in self.parts:
            count = len(part.values)
            parts = [
                materialise(block, leaf, count).reshape(count, -1)
                for block, leaf in zip(part.blocks, leaves, strict=True)
            ]
            dense.append(part.sort(jnp.concatenate(parts, axis=1)))
        return jnp.concatenate(dense)


def rows_of(
    function: Callable[[Vector], Float[Array, " rows"]],
    parameters: Vector,
    *,
    movable: tuple[bool, ...] | None = None,
) -> RowJacobian:
    """The rows of any function, each by a backward pass of its own, all in one batch."""
    leaves, tree = jax.tree.flatten(parameters)

    def of_leaves(leaves: Sequence[Array]) -> Float[Array, " rows"]:
        return function(jax.tree.unflatten(tree, leaves))

    live = find_live_inputs(jax.make_jaxpr(of_leaves)(leaves))
    moving = [leaf for leaf, is_live in zip(leaves, live, strict=True) if is_live]

    def of_moving(moving: Sequence[Array]) -> Float[Array, " rows"]:
        rest = iter(moving)
        return of_leaves([next(rest) if live[i] else leaf for i, leaf in enumerate(leaves)])

    values, pullback = jax.vjp(of_moving, moving)
    (gradients,) = pull_rows(pullback, jnp.eye(values.size, dtype=values.dtype))
    found = iter(gradients)
    blocks = [Stored(next(found)) if is_live else Absent() for is_live in live]
    return RowJacobian(values, tuple(blocks), tree, movable)


def pull_rows(
    pullback: Callable[[Array], PyTree], cotangents: Float[Array, "rows outputs"]
) -> PyTree[Float[Array, "rows ..."]]:
    """A backward pass for each row of cotangents: in one batch, or in turn where JAX cannot.

    JAX has no rule for the batch of a convolution with groups whose kernel lies on a mesh, nor for
    every kernel that a user may call.
    """
    try:
        return jax.vmap(pullback)(cotangents)
    except NotImplementedError:
        return jax.lax.map(pullback, cotangents)


def rows_of_slices(
    function: Callable[[Vector, Slice], Float[Array, " ..."]],
    parameters: Vector,
    slices: PyTree,
    *,
    movable: tuple[bool, ...] | None = None,
    outputs: tuple[int, ...] = (1,),
) -> RowJacobian:
    """The rows of each slice: ``slices`` is a pytree of arrays with the slices on the first axis.

    Args:
        function: (parameters, slice) ↦ its rows, one number or a vector.
        parameters: where the Jacobian is taken.
        slices: the batch, cut up.
        movable: which parameters the rows may move; None for all.
        outputs: how many rows a slice has; several numbers if all rows of the first kind are to
            come before those of the second.
    """
    order = RowOrder(jax.tree.leaves(slices)[0].shape[0], outputs)
    one = jax.tree.map(lambda leaf: leaf[0], slices)
    leaves, tree = jax.tree.flatten(parameters)
    closed = jax.make_jaxpr(lambda p, s: jnp.reshape(function(jax.tree.unflatten(tree, p), s), -1))(
        leaves, one
    )
    live = find_live_inputs(closed)[: len(leaves)]
    size = (order.examples, sum(outputs))
    taps = find_taps(closed.jaxpr, closed.jaxpr.invars[: len(leaves)])
    taps = {
        index: found
        for index, found in taps.items()
        if live[index]
        and (is_convolution(found[0].equation) or is_worth_factoring(found, leaves[index], *size))
    }
    tapped = [tap for found in taps.values() for tap in found]
    is_plain = [live[index] and index not in taps for index in range(len(leaves))]
    plain = [leaf for leaf, is_stored in zip(leaves, is_plain, strict=True) if is_stored]

    def with_taps(
        plain: list[Array], injected: list[Array], piece: Slice
    ) -> tuple[Array, list[Array]]:
        rest = iter(plain)
        values = [next(rest) if is_plain[i] else leaf for i, leaf in enumerate(leaves)]
        inject = {tap.path: value for tap, value in zip(tapped, injected, strict=True)}
        (result,), activations = run_with_taps(closed, [*values, *jax.tree.leaves(piece)], inject)
        return result, [activations[tap.path] for tap in tapped]

    zeros = [jnp.zeros(tap.output.shape, tap.output.dtype) for tap in tapped]

    def of_slice(piece: Slice) -> tuple[Array, list[Array], tuple[list[Array], list[Array]]]:
        values, pullback, activations = jax.vjp(
            lambda plain, injected: with_taps(plain, injected, piece), plain, zeros, has_aux=True
        )
        if len(values) == 1:
            return (
                values,
                activations,
                jax.tree.map(lambda g: g[None], pullback(jnp.ones_like(values))),
            )
        return values, activations, pull_rows(pullback, jnp.eye(len(values), dtype=values.dtype))

    values, activations, (gradients, signals) = jax.vmap(of_slice)(slices)
    factors = {tap.path: (a, s) for tap, a, s in zip(tapped, activations, signals, strict=True)}
    rest = iter(gradients)
    blocks: list[Block] = []
    for index in range(len(leaves)):
        if index in taps:
            layers = [(tap.equation, *factors[tap.path]) for tap in taps[index]]
            blocks.append(_make_tapped_block(layers))
        else:
            blocks.append(Stored(_merge_rows(next(rest))) if is_plain[index] else Absent())
    found = RowJacobian(values.reshape(-1), tuple(blocks), tree, movable, order)
    return dataclasses.replace(found, values=found.sort(found.values))


def count_bytes(jacobian: RowJacobian) -> int:
    """The bytes of everything that is stored; takes shapes as well as arrays."""
    leaves = jax.tree.leaves(jacobian.blocks)
    return sum(count_entries(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _make_tapped_block(layers: Sequence[tuple[jex.JaxprEqn, Array, Array]]) -> Block:
    """One kernel's block from the layers that use it: equation, activations, signals."""
    equations, activations, signals = zip(*layers, strict=True)
    if is_convolution(equations[0]):
        gradients = map(_find_kernel_gradients, equations, activations, signals)
        return Stored(_merge_rows(functools.reduce(operator.add, gradients)))
    return Factored(
        jnp.concatenate([_list_tokens(a, before=1) for a in activations], axis=1),
        jnp.concatenate([_list_tokens(s, before=2) for s in signals], axis=2),
    )


def _find_kernel_gradients(
    equation: jex.JaxprEqn, activations: Array, signals: Array
) -> Float[Array, "examples rows ..."]:
    kernel: Any = equation.invars[1].aval
    parameters = equation.params

    def of_example(activation: Array, signals: Array) -> Float[Array, "rows ..."]:
        return kernel_gradients(
            activation,
            signals,
            kernel=kernel.shape,
            strides=parameters["window_strides"],
            padding=parameters["padding"],
            dilation=parameters["rhs_dilation"],
            layout=parameters["dimension_numbers"],
        )

    return jax.vmap(of_example)(activations, signals)


def _correlate_rows(
    first: RowJacobian, second: RowJacobian, metric: list[Array] | None, *, movable_alone: bool
) -> Float[Array, "rows more_rows"]:
    """J₁ P₂ D J₂ᵀ, or J₁ P₁ P₂ D J₂ᵀ with ``movable_alone``."""
    parts = [
        correlate(first.blocks[index], second.blocks[index], metric[index] if metric else None)
        for index in range(len(first.blocks))
        if second.can_move(index) and (not movable_alone or first.can_move(index))
    ]
    dtype = jnp.result_type(jnp.float32, first.values, second.values)
    found = _add(parts, jnp.zeros((len(first.values), len(second.values)), dtype))
    return second.sort(first.sort(found).T).T


def _list_tokens(array: Array, *, before: int) -> Float[Array, "... tokens features"]:
    """All axes but the first few and the last as one."""
    tokens = count_entries(array.shape[before:-1])
    return array.reshape(*array.shape[:before], tokens, array.shape[-1])


def _merge_rows(gradients: Float[Array, "examples rows ..."]) -> Float[Array, "all_rows ..."]:
    examples, each = gradients.shape[:2]
    return gradients.reshape(examples * each, *gradients.shape[2:])


def _add(parts: Sequence[Array | None], zero: Array) -> Array:
    """The sum of the parts that are not None, or zero."""
    found = [part for part in parts if part is not None]
    return functools.reduce(operator.add, found) if found else zero


def _cumulate(counts: Sequence[int]) -> list[tuple[int, int]]:
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [(end - count, end) for end, count in zip(ends, counts, strict=True)]
