"""A written out as a matrix along its shorter side, for the direct solvers."""

from __future__ import annotations

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from constrainx.linalg._operator import LinearOperator
from constrainx.linalg._vector import Vector

Stacked: TypeAlias = PyTree[Float[Array, "short ..."]]


def short_side(operator: LinearOperator) -> tuple[bool, Stacked]:
    """Whether A is wide, and its rows if it is, else its columns, stacked on a new first axis.

    The long side stays a pytree: it is the parameters of a network, and may be sharded.
    """
    wide = operator.shape[0] < operator.shape[1]
    if wide:
        return True, jax.vmap(operator.rmatvec)(basis(operator.rows))
    return False, jax.vmap(operator.matvec)(basis(operator.columns))


def basis(structure: PyTree) -> Stacked:
    """The unit vectors of a space, stacked."""
    leaves, tree = jax.tree.flatten(structure)
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    total, start, stacked = sum(sizes), 0, []
    for leaf, size in zip(leaves, sizes, strict=True):
        block = jnp.eye(total, size, k=-start, dtype=leaf.dtype)
        stacked.append(block.reshape(total, *leaf.shape))
        start += size
    return jax.tree.unflatten(tree, stacked)


def combine(coefficients: Float[Array, " short"], stacked: Stacked) -> Vector:
    """The linear combination of the stacked vectors."""
    return jax.tree.map(
        lambda leaf: jnp.einsum(
            "i,i...->...", coefficients.astype(leaf.dtype), leaf, precision="highest"
        ),
        stacked,
    )


def flat(vector: Vector, dtype: jnp.dtype) -> Float[Array, " short"]:
    """A vector of the short side as a plain array."""
    return jnp.concatenate([leaf.reshape(-1).astype(dtype) for leaf in jax.tree.leaves(vector)])


def unflat(array: Float[Array, " short"], structure: PyTree) -> Vector:
    """The inverse of `flat`."""
    leaves, tree = jax.tree.flatten(structure)
    start, parts = 0, []
    for leaf in leaves:
        size = math.prod(leaf.shape)
        parts.append(array[start : start + size].reshape(leaf.shape).astype(leaf.dtype))
        start += size
    return jax.tree.unflatten(tree, parts)
