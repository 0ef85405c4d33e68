"""Matrices with singular values of at most a bound."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def clip_singular_values(
    matrix: Float[Array, "*stack n m"], bound: Float[Array, "*stack"]
) -> Float[Array, "*stack n m"]:
    """The nearest matrix with no singular value above a bound: U min(Σ, b) Vᵀ.

    By the eigenvalues λ of MᵀM, or of M Mᵀ if that is smaller: M V h(λ) Vᵀ with
    h(λ) = min(1, b/√λ).
    """
    if matrix.shape[-2] < matrix.shape[-1]:
        return _transpose(clip_singular_values(_transpose(matrix), bound))
    gram = _multiply(_transpose(matrix), matrix)
    # M − M (1 − h), so that what is within the bound does not change at all.
    return matrix - _multiply(matrix, _excess_factor(gram, bound))


def spectral_norm(matrix: Float[Array, "*stack n m"]) -> Float[Array, "*stack"]:
    """The largest singular value, by the eigenvalues of the smaller Gram matrix."""
    matrix = matrix if matrix.shape[-2] >= matrix.shape[-1] else _transpose(matrix)
    square = jnp.linalg.eigvalsh(_multiply(_transpose(matrix), matrix))[..., -1]
    return _root(square)


def largest_singular_values(
    matrix: Float[Array, "*stack n m"], count: int, iterations: int
) -> Float[Array, "*stack count"]:
    """The largest singular values, in decreasing order, by the power method on a few vectors.

    It starts from the same vectors each time. Each value is a lower bound of the true one: the
    vectors span a space, and these are the singular values of the matrix on it. Their derivatives
    are u vᵀ, exact once the vectors have converged.
    """
    matrix = matrix if matrix.shape[-2] >= matrix.shape[-1] else _transpose(matrix)
    size = matrix.shape[-1]
    # More vectors than values: the last ones converge slowly.
    width = min(size, 2 * count + 2)
    fixed = jax.lax.stop_gradient(matrix)
    start = jax.random.normal(jax.random.key(0), (size, width), matrix.dtype)
    start = jnp.broadcast_to(start, (*matrix.shape[:-2], size, width))

    def improve(_: int, vectors: Array) -> Array:
        # If the matrix is zero, so is what it makes of them, and QR of zeros is fine.
        return jnp.linalg.qr(_multiply(_transpose(fixed), _multiply(fixed, vectors)))[0]

    steps = iterations if width < size else 0
    vectors = jax.lax.fori_loop(0, steps, improve, jnp.linalg.qr(start)[0])
    seen = _multiply(fixed, vectors)
    _, turns = jnp.linalg.eigh(_multiply(_transpose(seen), seen))
    right = jax.lax.stop_gradient(_multiply(vectors, turns[..., ::-1][..., :count]))
    return _root(jnp.sum(jnp.square(_multiply(matrix, right)), axis=-2))


@jax.custom_jvp
def _excess_factor(gram: Float[Array, "*stack k k"], bound: Float[Array, "*stack"]) -> Array:
    """V (1 − h(λ)) Vᵀ for the eigenvalues λ of a Gram matrix."""
    values, vectors = jnp.linalg.eigh(gram)
    return _compose(vectors, _shrink(values, bound))


@_excess_factor.defjvp
def _differentiate(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple:
    """By divided differences, because single eigenvectors have no derivative where values meet."""
    (gram, bound), (gram_dot, bound_dot) = primals, tangents
    values, vectors = jnp.linalg.eigh(gram)
    roots = jnp.sqrt(jnp.maximum(values, 0))
    above = roots > bound[..., None]
    safe = jnp.where(above, roots, 1)
    limit = bound[..., None, None]
    a, c = roots[..., :, None], roots[..., None, :]
    both = above[..., :, None] & above[..., None, :]
    one = above[..., :, None] ^ above[..., None, :]
    high, low = jnp.maximum(a, c), jnp.minimum(a, c)
    # Of −h: b / (√λ √μ (√λ + √μ)) if both are above, (1 − b/√λ) / (λ − μ) if one is.
    product = jnp.where(both, a * c * (a + c), 1)
    gap = jnp.where(one, high**2 - low**2, 1)
    ratio = jnp.where(
        both,
        limit / product,
        jnp.where(one, (1 - limit / jnp.where(one, high, 1)) / jnp.where(gap > 0, gap, 1), 0),
    )
    inner = _multiply(_multiply(_transpose(vectors), gram_dot), vectors)
    change = _multiply(_multiply(vectors, ratio * inner), _transpose(vectors))
    by_bound = _compose(vectors, jnp.where(above, -1 / safe, 0))
    return _compose(vectors, _shrink(values, bound)), change + by_bound * bound_dot[..., None, None]


def _shrink(values: Array, bound: Array) -> Array:
    """1 − h(λ)."""
    roots, bound = jnp.sqrt(jnp.maximum(values, 0)), bound[..., None]
    above = roots > bound
    return jnp.where(above, 1 - bound / jnp.where(above, roots, 1), 0)


def _root(squares: Array) -> Array:
    """The square root, with the slope zero at zero."""
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)


def _compose(vectors: Array, values: Array) -> Array:
    return _multiply(vectors * values[..., None, :], _transpose(vectors))


def _transpose(matrix: Array) -> Array:
    return jnp.swapaxes(matrix, -1, -2)


def _multiply(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision="highest")
