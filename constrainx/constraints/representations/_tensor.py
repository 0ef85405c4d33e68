"""Vectors and tensors, on which a group acts by its matrices."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from constrainx.constraints._numbers import as_count
from constrainx.constraints._symmetry import Element, Group, Representation
from constrainx.errors import ArgumentError, ArgumentTypeError


@dataclasses.dataclass(frozen=True)
class Vector(Representation):
    """Vectors v ↦ R v, R the element's defining matrix.

    The last axis holds one vector, or several one after another: shapes (n,), (k, n) and (k n,) all
    work, and in (k n,) the first n entries are the first vector.

    Attributes:
        copies: the number of vectors on the last axis; None for any number.
    """

    copies: int | None = None

    def __post_init__(self) -> None:
        if self.copies is not None:
            fix = "Use None for any number of vectors."
            copies = as_count(self.copies, argument="Vector(copies=...)", fix=fix)
            object.__setattr__(self, "copies", copies)

    def check(self, group: Group) -> None:
        """Raises an error unless the group has matrices."""
        _check_matrices(self, group)

    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """Returns the rotated vectors."""
        matrix = group.matrix(element)
        size = matrix.shape[-1]
        copies, rest = divmod(array.shape[-1] if array.ndim else 0, size)
        if rest or not copies or copies != (self.copies or copies):
            raise ArgumentError(
                f"`{self}` of {group} needs {self.copies or 'one or more'} vectors of {size} "
                f"entries on the last axis, got shape {array.shape}."
            )
        return _rotate(matrix, array.reshape(*array.shape[:-1], -1, size), rank=1, like=array)


@dataclasses.dataclass(frozen=True)
class Tensor(Representation):
    """Tensors of any rank, each index rotated by the defining matrix: T ↦ R T Rᵀ for rank 2.

    Either the last ``rank`` axes have length n each, or the last axis holds one or more flattened
    tensors of n**rank entries each.

    Attributes:
        rank: the number of indices.
    """

    rank: int

    def __post_init__(self) -> None:
        rank = as_count(self.rank, argument="Tensor(rank=...)", least=0)
        object.__setattr__(self, "rank", rank)

    def check(self, group: Group) -> None:
        """Raises an error unless the group has matrices."""
        _check_matrices(self, group)

    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """Returns the rotated tensors."""
        matrix = group.matrix(element)
        shape = (matrix.shape[-1],) * self.rank
        if array.ndim >= self.rank and array.shape[array.ndim - self.rank :] == shape:
            return _rotate(matrix, array, rank=self.rank, like=array)
        if not array.ndim or not array.shape[-1] or array.shape[-1] % math.prod(shape):
            raise ArgumentError(
                f"`{self}` of {group} takes arrays of shape (..., {', '.join(map(str, shape))}) or "
                f"(..., k*{math.prod(shape)}), got shape {array.shape}."
            )
        tensors = array.reshape(*array.shape[:-1], -1, *shape)
        return _rotate(matrix, tensors, rank=self.rank, like=array)


def _rotate(matrix: Float[Array, "n n"], tensors: Array, *, rank: int, like: Array) -> Array:
    """Rotates the last ``rank`` axes; keeps the shape of ``like`` and its dtype, if inexact."""
    # In half precision R would not be orthogonal, so the product is in the precision of R.
    result = tensors.astype(jnp.result_type(tensors, matrix))
    for axis in range(result.ndim - rank, result.ndim):
        rotated = jnp.tensordot(result, matrix, axes=(axis, 1), precision="highest")
        result = jnp.moveaxis(rotated, -1, axis)
    dtype = like.dtype if jnp.issubdtype(like.dtype, jnp.inexact) else result.dtype
    return result.reshape(like.shape).astype(dtype)


def _check_matrices(representation: Representation, group: Group) -> None:
    if group.dimension is None:
        raise ArgumentTypeError(
            f"`{representation}` needs a group with matrices, such as Orthogonal(3), got {group}. "
            "Translations act through `Image()`."
        )
