"""One parameter's part of a Jacobian, stored row by row or as a sum of outer products.

Through a dense layer z = a W the gradient of a row is a sum of outer products over the tokens that
it sees, ∇W cᵢ = Σₜ aₜ δₜᵀ with the signals δ = ∂c/∂z, so that with activations a and signals δ

    ⟨∇cᵢ, ∇cⱼ⟩ = Σₜₛ (aₜ·aₛ)(δₜ·δₛ),    ⟨∇cᵢ, U⟩ = Σₜ aₜᵀU δₜ,    Σᵢ λᵢ∇cᵢ = Σᵢₜ λᵢ aₜ δₜᵀ,

none of which needs a gradient the size of W for each row (Novak, Sohl-Dickstein and Schoenholz,
"Fast finite width neural tangent kernel", 2022). Several rows of one example share its activations.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Entries of a temporary array above which a product is computed row by row.
LARGEST_TEMPORARY = 2**25
# Longer sums in float32 are split in two, so that rounding errors grow with the root of the length.
LONGEST_SUM = 2**14


class Stored(NamedTuple):
    """One parameter's gradients, row by row."""

    gradients: Float[Array, "rows ..."]


class Factored(NamedTuple):
    """One kernel's gradients as sums over tokens of activation times signal.

    The rows are those of the first example, then those of the second, and so on.
    """

    activations: Float[Array, "examples tokens inputs"]
    signals: Float[Array, "examples rows_of_each tokens outputs"]


class Absent(NamedTuple):
    """The rows do not depend on this parameter."""


Block: TypeAlias = Stored | Factored | Absent


def multiply(block: Block, update: Array) -> Float[Array, " rows"] | None:
    """This parameter's part of J u, or None if it has none."""
    if isinstance(block, Absent):
        return None
    if isinstance(block, Stored):
        return _contract(block.gradients, update[None])[:, 0]
    images = _einsum("nti,io->nto", block.activations, update)
    return _einsum("nto,nkto->nk", images, block.signals).reshape(-1)


def combine(block: Block, weights: Float[Array, " rows"]) -> Array | None:
    """This parameter's part of Jᵀλ, or None if it has none."""
    if isinstance(block, Absent):
        return None
    weights = _widen(weights)
    if isinstance(block, Stored):
        if len(block.gradients) == 1:
            return weights[0] * block.gradients[0]
        return _einsum("k,k...->...", weights, block.gradients)
    signals = _einsum("nk,nkto->nto", weights.reshape(block.signals.shape[:2]), block.signals)
    return _einsum("nti,nto->io", block.activations, signals)


def correlate(
    first: Block, second: Block, metric: Array | None = None
) -> Float[Array, "rows more_rows"] | None:
    """This parameter's part of J₁ D J₂ᵀ for the rows of two Jacobians, or None if it has none."""
    if isinstance(first, Absent) or isinstance(second, Absent):
        return None
    if isinstance(first, Stored) and isinstance(second, Stored):
        return _contract(_scale(first.gradients, metric), second.gradients)
    if isinstance(first, Stored) and isinstance(second, Factored):
        return _correlate_mixed(_scale(first.gradients, metric), second)
    if isinstance(first, Factored) and isinstance(second, Stored):
        return _correlate_mixed(_scale(second.gradients, metric), first).T
    assert isinstance(first, Factored)
    assert isinstance(second, Factored)
    if metric is None:
        return _correlate_factored(first, second)

    def of_example(example: Factored) -> Float[Array, "rows_of_each more_rows"]:
        def one_row(signals: Array) -> Float[Array, " more_rows"]:
            gradient = _einsum("ti,to->io", example.activations, signals) * metric
            return _correlate_mixed(gradient[None], second)[0]

        return jax.lax.map(one_row, example.signals)  # a gradient of the kernel's size at a time

    found = jax.lax.map(of_example, first)
    return found.reshape(-1, found.shape[-1])


def materialise(block: Block, like: Array, rows: int) -> Float[Array, "rows ..."]:
    """The gradients row by row, whatever the form."""
    if isinstance(block, Absent):
        return jnp.zeros((rows, *like.shape), like.dtype)
    if isinstance(block, Stored):
        return block.gradients
    gradients = _einsum("nti,nkto->nkio", block.activations, block.signals)
    examples, each = gradients.shape[:2]
    return gradients.reshape(examples * each, *gradients.shape[2:])


def _correlate_factored(first: Factored, second: Factored) -> Float[Array, "rows more_rows"]:
    (n, k, t, _), (m, j, s, _) = first.signals.shape, second.signals.shape
    if n * k * t * m * j * s <= LARGEST_TEMPORARY or n == 1:
        activations, signals = map(_pair_tokens, first, second)
        activations = activations.reshape(n, 1, t, m, 1, s)
        product = activations * signals.reshape(n, k, t, m, j, s)
        return product.sum(axis=(2, 5)).reshape(n * k, m * j)

    def of_example(example: Factored) -> Float[Array, "rows_of_each more_rows"]:
        return _correlate_factored(Factored(*(part[None] for part in example)), second)

    return jax.lax.map(of_example, first).reshape(n * k, m * j)


def _pair_tokens(first: Array, second: Array) -> Float[Array, "tokens more_tokens"]:
    """The inner products of all vectors on the last axes."""
    first, second = (array.reshape(-1, array.shape[-1]) for array in (first, second))
    return _einsum("ti,si->ts", first, second)


def _correlate_mixed(
    gradients: Float[Array, "rows inputs outputs"], factored: Factored
) -> Float[Array, "rows more_rows"]:
    """Σₜ aₜᵀ G δₜ for each gradient G and each factored row."""
    activations, signals = factored

    def one_row(gradient: Array) -> Float[Array, " more_rows"]:
        images = _einsum("nti,io->nto", activations, gradient)
        return _einsum("nto,nkto->nk", images, signals).reshape(-1)

    if len(gradients) * signals.size > LARGEST_TEMPORARY:
        return jax.lax.map(one_row, gradients)
    return jax.vmap(one_row)(gradients)


def _scale(gradients: Float[Array, "rows ..."], metric: Array | None) -> Float[Array, "rows ..."]:
    # Before the product, which bfloat16 would round.
    return gradients if metric is None else _widen(gradients) * metric


def _contract(
    first: Float[Array, "rows ..."], second: Float[Array, "more_rows ..."]
) -> Float[Array, "rows more_rows"]:
    """The inner products of all rows of one with all rows of the other.

    Over a million entries a plain float32 sum loses three digits. So long sums are taken in two
    levels: over chunks of an axis first, then over the chunks.
    """
    first, second = (_widen(side) for side in (first, second))
    is_short = math.prod(first.shape[1:]) <= LONGEST_SUM or first.dtype == jnp.float64
    if first.ndim == 1:
        return first[:, None] * second
    if len(first) == len(second) == 1:
        return _sum(first[0] * second[0], in_chunks=not is_short)[None, None]
    if is_short:
        return _einsum("k...,l...->kl", first, second)
    axis, parts = _split_axis(first.shape[1:])
    chunks = [jnp.moveaxis(_chunk(side, axis + 1, parts), axis + 1, 0) for side in (first, second)]
    return jnp.sum(_einsum("ck...,cl...->ckl", *chunks), axis=0)


def _sum(entries: Array, *, in_chunks: bool) -> Float[Array, ""]:
    """The sum of all entries, in one pass over what they are computed from.

    The chunks stay where they are: bringing them to the front, as a product of matrices needs it,
    would copy the entries.
    """
    if not in_chunks:
        return jnp.sum(entries)
    axis, parts = _split_axis(entries.shape)
    split = _chunk(entries, axis, parts)
    return jnp.sum(jnp.sum(split, axis=[i for i in range(split.ndim) if i != axis]))


def _split_axis(shape: tuple[int, ...]) -> tuple[int, int]:
    """The longest axis, and a number of chunks near the root of all entries that divides it."""
    axis = max(range(len(shape)), key=lambda i: shape[i])
    goal = math.isqrt(math.prod(shape))
    divisors = [n for n in range(1, math.isqrt(shape[axis]) + 1) if shape[axis] % n == 0]
    divisors += [shape[axis] // n for n in divisors]
    return axis, min(divisors, key=lambda n: abs(math.log(n / goal)))


def _chunk(rows: Array, axis: int, parts: int) -> Array:
    """The rows with an axis cut into chunks, which are the axis before what is left of it."""
    shape = rows.shape
    return rows.reshape(*shape[:axis], parts, shape[axis] // parts, *shape[axis + 1 :])


def _widen(array: Array) -> Array:
    return array.astype(jnp.result_type(jnp.float32, array))


def _einsum(subscripts: str, *operands: Array) -> Array:
    dtype = jnp.result_type(jnp.float32, *operands)
    return jnp.einsum(subscripts, *(o.astype(dtype) for o in operands), precision="highest")
