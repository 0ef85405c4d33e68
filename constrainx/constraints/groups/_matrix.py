"""A finite group from the user's own matrices."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from constrainx.constraints._symmetry import Element, NumberedGroup
from constrainx.constraints.representations import Vector
from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class MatrixGroup(NumberedGroup):
    """A finite group of your own matrices: the element k is the k-th of them.

    >>> from constrainx.constraints.groups import MatrixGroup
    >>> MatrixGroup.generated_by([[[0, -1], [1, 0]]]).order
    4

    Attributes:
        matrices: all matrices of the group, a nested sequence or an array of shape (order, n, n).
            Construction checks that they form a group, to about five digits.
    """

    matrices: Any

    usual_representation = Vector()

    def __post_init__(self) -> None:
        stack = _as_stack(self.matrices, argument="MatrixGroup(matrices=...)")
        # Nested tuples, because arrays have no hash.
        nested = tuple(tuple(tuple(map(float, row)) for row in matrix) for matrix in stack)
        object.__setattr__(self, "matrices", nested)
        _tabulate_products(nested)

    @classmethod
    def generated_by(cls, generators: Any, *, most: int = 200) -> MatrixGroup:
        """Returns the group of all products of some matrices.

        Args:
            generators: matrices, in an array of shape (count, n, n).
            most: the order beyond which to give up with an error.
        """
        stack = _as_stack(generators, argument="MatrixGroup.generated_by(generators)")
        found = [np.eye(stack.shape[-1])]
        for matrix, generator in (
            (m, g) for m in found for g in stack
        ):  # `found` grows in the loop
            if _find(found, matrix @ generator) is None:
                found.append(matrix @ generator)
            if len(found) > most:
                raise ArgumentError(
                    f"`MatrixGroup.generated_by(generators)` made more than most={most} matrices. "
                    "If the group is finite, raise `most`, or give the generators with more digits."
                )
        return cls(np.stack(found))

    @property
    def dimension(self) -> int:
        """The size of the matrices."""
        return len(self.matrices[0])

    @property
    def order(self) -> int:
        """The number of matrices."""
        return len(self.matrices)

    @property
    def identity(self) -> int:
        """The position of the identity matrix."""
        return int(np.argmax(_tabulate_products(self.matrices)[:, 0] == 0))

    @property
    def generators(self) -> Int[np.ndarray, " some"]:
        """Each matrix that is not a product of those before it."""
        table = _tabulate_products(self.matrices)
        chosen: list[int] = []
        reached = [self.identity]
        for candidate in range(self.order):
            if candidate not in reached:
                chosen.append(candidate)
                for product in (int(table[g, h]) for g in reached for h in chosen):
                    if product not in reached:
                        reached.append(product)  # which the loop will visit, too
        return np.array(chosen, int)

    def compose(self, g: Element, h: Element) -> Int[Array, ""]:
        """The product, from the multiplication table."""
        return jnp.asarray(_tabulate_products(self.matrices))[g, h]

    def inverse(self, g: Element) -> Int[Array, ""]:
        """The inverse, from the multiplication table."""
        table = _tabulate_products(self.matrices)
        return jnp.asarray(np.argmax(table == self.identity, axis=1))[g]

    def matrix(self, g: Element) -> Float[Array, "n n"]:
        """The matrix as it was given."""
        return jnp.asarray(self.matrices, dtype=float)[g]


def _as_stack(matrices: Any, *, argument: str) -> Float[np.ndarray, "order n n"]:
    try:
        stack = np.asarray(matrices, dtype=float)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"`{argument}` must be matrices of one shape, got {matrices!r}."
        ) from error
    if stack.ndim != 3 or stack.shape[1] != stack.shape[2] or not stack.size:
        raise ArgumentError(
            f"`{argument}` must be square matrices in an array of shape (order, n, n), got shape "
            f"{stack.shape}."
        )
    if not np.isfinite(stack).all():
        raise ArgumentError(f"`{argument}` must be finite, got {stack!r}.")
    return stack


def _find(stack: Any, matrix: np.ndarray) -> int | None:
    found = np.isclose(stack, matrix, rtol=1e-5, atol=1e-5).all(axis=(-1, -2))
    return int(np.argmax(found)) if found.any() else None


@functools.cache
def _tabulate_products(matrices: tuple) -> Int[np.ndarray, "order order"]:
    """Returns the position of the product of each pair, or raises if this is not a group."""
    stack = np.array(matrices)
    fix = "List each element once, or use `MatrixGroup.generated_by(...)`."
    for i, matrix in enumerate(stack):
        if (first := _find(stack, matrix)) != i:
            raise ArgumentError(
                f"`MatrixGroup(matrices=...)`: matrices[{i}] equals matrices[{first}]. {fix}"
            )
        if np.linalg.matrix_rank(matrix) < len(matrix):
            raise ArgumentError(f"`MatrixGroup(matrices=...)`: matrices[{i}] has no inverse. {fix}")
    table = np.empty((len(stack), len(stack)), int)
    for g, h in itertools.product(range(len(stack)), repeat=2):
        product = _find(stack, stack[g] @ stack[h])
        if product is None:
            raise ArgumentError(
                f"`MatrixGroup(matrices=...)` is not closed under products: matrices[{g}] @ "
                f"matrices[{h}] is not among them. {fix}"
            )
        table[g, h] = product
    return table
