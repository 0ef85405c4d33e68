"""The Jacobian of a few scalar rows, in a form that makes their inner products cheap.

A row that depends on its own slice of the batch has its gradient in one backward pass with all the
others. And through a dense layer z = a W that gradient is a sum of outer products over the examples
of the slice, ∇W cᵢ = Σₜ aₜ δₜᵀ with δ = ∂c/∂z, so that with the activations a and the signals δ

    ⟨∇cᵢ, ∇cⱼ⟩ = Σₜₛ (aₜ·aₛ)(δₜ·δₛ),    ⟨∇cᵢ, U⟩ = Σₜ aₜᵀU δₜ,    Σᵢ λᵢ∇cᵢ = Σᵢₜ λᵢ aₜ δₜᵀ,

none of which needs a gradient the size of W for each row (Novak, Sohl-Dickstein and Schoenholz,
"Fast finite width neural tangent kernel", 2022). A convolution is a dense layer on patches, with a
token for each position; its kernel is small, so the sums are carried out. Where neither is
possible, or not worth it, the rows' gradients are stored as JAX has them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from constrainx.linalg import Vector
from constrainx.step._patches import kernel_gradient
from constrainx.step._taps import (
    count_entries,
    find_taps,
    is_convolution,
    is_worth_factoring,
    run_with_taps,
)

Slice: TypeAlias = Any


class Stored(NamedTuple):
    """One parameter's gradients, row by row."""

    gradients: Float[Array, "rows ..."]


class Factored(NamedTuple):
    """One kernel's gradients as sums over tokens of activation times signal."""

    activations: Float[Array, "rows tokens inputs"]
    signals: Float[Array, "rows tokens outputs"]


Block: TypeAlias = Stored | Factored


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "blocks"], meta_fields=["tree"]
)
@dataclasses.dataclass(frozen=True)
class RowJacobian:
    """k rows, the values c and the Jacobian J, a block for each leaf of the parameters."""

    values: Float[Array, " rows"]
    blocks: tuple[Block, ...]
    tree: Any

    def matvec(self, update: Vector) -> Float[Array, " rows"]:
        """J u."""
        return _total(map(_times, self.blocks, self.tree.flatten_up_to(update)))

    def rmatvec(self, weights: Float[Array, " rows"]) -> Vector:
        """Jᵀλ."""
        return jax.tree.unflatten(self.tree, [_combine(b, weights) for b in self.blocks])

    def gram(self, metric: Vector | None = None) -> Float[Array, "rows rows"]:
        """J Jᵀ, or J D Jᵀ with a diagonal metric D."""
        if metric is None:
            return _total(map(_gram, self.blocks))
        return _total(map(_weighted_gram, self.blocks, self.tree.flatten_up_to(metric)))


def stack_rows(parts: Sequence[RowJacobian]) -> RowJacobian:
    """The rows of several Jacobians with respect to the same parameters, one below the other."""
    if len(parts) == 1:
        return parts[0]
    return RowJacobian(
        jnp.concatenate([part.values for part in parts]),
        tuple(map(_stack_blocks, *(part.blocks for part in parts))),
        parts[0].tree,
    )


def rows_of(function: Callable[[Vector], Float[Array, " rows"]], parameters: Vector) -> RowJacobian:
    """The rows of any function, each by a backward pass of its own, all in one batch."""
    values, pullback = jax.vjp(function, parameters)
    (gradients,) = jax.vmap(pullback)(jnp.eye(values.size, dtype=values.dtype))
    leaves, tree = jax.tree.flatten(gradients)
    return RowJacobian(values, tuple(Stored(leaf) for leaf in leaves), tree)


def rows_of_slices(
    function: Callable[[Vector, Slice], Float[Array, ""]], parameters: Vector, slices: PyTree
) -> RowJacobian:
    """A row for each slice: ``slices`` is a pytree of arrays with the slices on the first axis.

    Args:
        function: (parameters, slice) ↦ one number.
        parameters: where the Jacobian is taken.
        slices: the batch, cut up.
    """
    one = jax.tree.map(lambda leaf: leaf[0], slices)
    leaves, tree = jax.tree.flatten(parameters)
    closed = jax.make_jaxpr(lambda p, s: function(jax.tree.unflatten(tree, p), s))(leaves, one)
    rows = jax.tree.leaves(slices)[0].shape[0]
    equations = closed.jaxpr.eqns
    taps = find_taps(closed.jaxpr, closed.jaxpr.invars[: len(leaves)])
    taps = {
        index: found
        for index, found in taps.items()
        if is_convolution(equations[found[0].equation])
        or is_worth_factoring(found, leaves[index], rows)
    }
    tapped = [tap for found in taps.values() for tap in found]
    plain = [leaf for index, leaf in enumerate(leaves) if index not in taps]

    def with_taps(
        plain: list[Array], injected: list[Array], piece: Slice
    ) -> tuple[Array, list[Array]]:
        rest = iter(plain)
        values = [leaves[i] if i in taps else next(rest) for i in range(len(leaves))]
        inject = {tap.equation: value for tap, value in zip(tapped, injected, strict=True)}
        activations: dict[int, Array] = {}
        (result,) = run_with_taps(
            closed.jaxpr, closed.consts, [*values, *jax.tree.leaves(piece)], inject, activations
        )
        return result, [activations[tap.equation] for tap in tapped]

    zeros = [jnp.zeros(tap.shape, tap.dtype) for tap in tapped]
    pull = jax.value_and_grad(with_taps, argnums=(0, 1), has_aux=True)
    (values, activations), (gradients, signals) = jax.vmap(pull, in_axes=(None, None, 0))(
        plain, zeros, slices
    )
    factors = {tap.equation: (a, s) for tap, a, s in zip(tapped, activations, signals, strict=True)}
    rest = iter(gradients)
    blocks = [
        _tapped_block([(equations[tap.equation], *factors[tap.equation]) for tap in taps[index]])
        if index in taps
        else Stored(next(rest))
        for index in range(len(leaves))
    ]
    return RowJacobian(values, tuple(blocks), tree)


def _tapped_block(layers: Sequence[tuple[jex.JaxprEqn, Array, Array]]) -> Block:
    """One kernel's block from the layers that use it: equation, activations, signals."""
    equations, activations, signals = zip(*layers, strict=True)
    if is_convolution(equations[0]):
        return Stored(_total(map(_kernel_gradients, equations, activations, signals)))
    return Factored(
        jnp.concatenate([_tokens(a) for a in activations], axis=1),
        jnp.concatenate([_tokens(s) for s in signals], axis=1),
    )


def _kernel_gradients(
    equation: jex.JaxprEqn, activations: Array, signals: Array
) -> Float[Array, "rows ..."]:
    kernel: Any = equation.invars[1].aval
    parameters = equation.params

    def one_row(activation: Array, signal: Array) -> Array:
        return kernel_gradient(
            activation,
            signal,
            kernel=kernel.shape,
            strides=parameters["window_strides"],
            padding=parameters["padding"],
            dilation=parameters["rhs_dilation"],
            layout=parameters["dimension_numbers"],
        )

    return jax.vmap(one_row)(activations, signals)


def _tokens(array: Array) -> Float[Array, "rows tokens features"]:
    rows, features = array.shape[0], array.shape[-1]
    return array.reshape(rows, count_entries(array.shape[1:-1]), features)


def _total(parts: Any) -> Array:
    return functools.reduce(operator.add, parts)


def _einsum(subscripts: str, *operands: Array) -> Array:
    dtype = jnp.result_type(jnp.float32, *operands)
    return jnp.einsum(subscripts, *(o.astype(dtype) for o in operands), precision="highest")


def _dot(left: Array, right: Array) -> Float[Array, ""]:
    """The inner product of two arrays, for a single row: XLA makes one pass over each of them."""
    dtype = jnp.result_type(jnp.float32, left, right)
    return jnp.tensordot(
        left.astype(dtype), right.astype(dtype), axes=left.ndim, precision="highest"
    )


def _materialise(block: Block) -> Float[Array, "rows ..."]:
    if isinstance(block, Stored):
        return block.gradients
    return _einsum("kti,kto->kio", block.activations, block.signals)


def _times(block: Block, update: Array) -> Float[Array, " rows"]:
    if isinstance(block, Stored):
        if len(block.gradients) == 1:
            return _dot(block.gradients[0], update)[None]
        return _einsum("k...,...->k", block.gradients, update)
    images = _einsum("kti,io->kto", block.activations, update)
    return _einsum("kto,kto->k", images, block.signals)


def _combine(block: Block, weights: Float[Array, " rows"]) -> Array:
    if isinstance(block, Stored):
        if len(block.gradients) == 1:
            return weights[0] * block.gradients[0]
        return _einsum("k,k...->...", weights, block.gradients)
    signals = weights[:, None, None] * block.signals
    return _einsum("kti,kto->io", block.activations, signals)


def _gram(block: Block) -> Float[Array, "rows rows"]:
    if isinstance(block, Stored):
        if len(block.gradients) == 1:
            return _dot(block.gradients[0], block.gradients[0])[None, None]
        return _einsum("k...,l...->kl", block.gradients, block.gradients)
    rows, tokens, _ = block.activations.shape
    flat = [side.reshape(rows * tokens, side.shape[-1]) for side in block]
    products = _einsum("ti,si->ts", flat[0], flat[0]) * _einsum("to,so->ts", flat[1], flat[1])
    return products.reshape(rows, tokens, rows, tokens).sum(axis=(1, 3))


def _weighted_gram(block: Block, metric: Array) -> Float[Array, "rows rows"]:
    gradients = _materialise(block)
    return _einsum("k...,l...->kl", gradients * metric, gradients)


def _stack_blocks(*blocks: Block) -> Block:
    return Stored(jnp.concatenate([_materialise(block) for block in blocks]))
