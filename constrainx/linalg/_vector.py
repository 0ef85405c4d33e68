"""Pytrees as vectors: inner products, norms and linear combinations, leaf by leaf.

Nothing here reshapes, ravels or concatenates a leaf, so each leaf keeps its shape and its sharding
through a whole solve.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

Vector: TypeAlias = PyTree[Float[Array, "..."]]
Scalar: TypeAlias = Float[Array, ""]


def working_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype to compute in for a leaf of this dtype: the same, but at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def scalar_dtype(*vectors: PyTree) -> jnp.dtype:
    """The dtype of inner products: the widest working dtype among all leaves."""
    dtypes = [working_dtype(leaf.dtype) for leaf in jax.tree.leaves(vectors)]
    return functools.reduce(jnp.promote_types, dtypes, jnp.dtype(jnp.float32))


def size(vector: PyTree) -> int:
    """The dimension of the space that the vector lives in."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(vector))


def zeros_like(vector: PyTree) -> Vector:
    """The zero of the space; takes arrays or anything with a shape and a dtype."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), vector)


def dot(left: Vector, right: Vector) -> Scalar:
    """The inner product, summed in the widest working dtype among the leaves."""
    dtype = scalar_dtype(left, right)

    def leaf_dot(a: Array, b: Array) -> Array:
        # A sum of products rather than `jnp.vdot`: `vdot` ravels, which gathers a sharded leaf,
        # and a dot product is rounded to TF32 on recent GPUs.
        return jnp.sum(a.astype(dtype) * b.astype(dtype))

    products = jax.tree.leaves(jax.tree.map(leaf_dot, left, right))
    return functools.reduce(operator.add, products, jnp.zeros((), dtype))


def norm(vector: Vector) -> Scalar:
    """The Euclidean norm, for entries whose squares stay within the range of the dtype."""
    return jnp.sqrt(dot(vector, vector))


def safe_norm(vector: Vector) -> Scalar:
    """The Euclidean norm for entries of any size, at the cost of one more pass."""
    peak = largest(vector)
    divisor = jnp.where(jnp.isfinite(peak) & (peak > 0), peak, 1)
    return divisor * norm(jax.tree.map(lambda leaf: leaf / divisor.astype(leaf.dtype), vector))


def largest(vector: Vector) -> Scalar:
    """The largest absolute entry; a NaN anywhere makes it NaN."""
    dtype = scalar_dtype(vector)
    peaks = [jnp.max(jnp.abs(leaf), initial=0).astype(dtype) for leaf in jax.tree.leaves(vector)]
    return functools.reduce(jnp.maximum, peaks, jnp.zeros((), dtype))


def scale(factor: Scalar | float, vector: Vector) -> Vector:
    """``factor * vector``, each leaf in its own dtype."""
    return jax.tree.map(lambda leaf: _like(factor, leaf) * leaf, vector)


def add(left: Vector, right: Vector) -> Vector:
    """``left + right``."""
    return jax.tree.map(jnp.add, left, right)


def subtract(left: Vector, right: Vector) -> Vector:
    """``left - right``."""
    return jax.tree.map(jnp.subtract, left, right)


def axpy(factor: Scalar | float, left: Vector, right: Vector) -> Vector:
    """``factor * left + right``, each leaf in its own dtype."""
    return jax.tree.map(lambda a, b: _like(factor, b) * a + b, left, right)


def reciprocal(value: Scalar) -> Scalar:
    """1 / value, or zero for zero."""
    return jnp.where(value == 0, 0, 1 / jnp.where(value == 0, 1, value))


def power_of_two(value: Scalar) -> Scalar:
    """2ᵏ with 2ᵏ|value| in [½, 1); one for zero and for what is not finite."""
    exponent = jnp.frexp(jnp.where(jnp.isfinite(value) & (value != 0), value, 0.5))[1]
    limits = jnp.finfo(value.dtype)
    return jnp.ldexp(
        jnp.ones_like(value), -jnp.clip(exponent, limits.minexp + 2, limits.maxexp - 2)
    )


def cast(vector: Vector, like: PyTree) -> Vector:
    """The vector with the dtypes of ``like``."""
    return jax.tree.map(lambda leaf, target: leaf.astype(target.dtype), vector, like)


def where(condition: Any, left: Vector, right: Vector) -> Vector:
    """``left`` where the scalar condition holds, else ``right``."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), left, right)


def _like(factor: Scalar | float, leaf: Array) -> Scalar | float:
    return factor.astype(leaf.dtype) if isinstance(factor, jax.Array) else factor
