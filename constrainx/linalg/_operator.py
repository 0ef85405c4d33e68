"""A linear map between pytrees, known only by its products with vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import PyTree

from constrainx.linalg import _vector
from constrainx.linalg._linearity import has_custom_vjp
from constrainx.linalg._vector import Vector


@dataclasses.dataclass(frozen=True)
class LinearOperator:
    """A linear map A from vectors shaped like ``columns`` to vectors shaped like ``rows``.

    This is all that a solver sees of the user's problem.

    Attributes:
        matvec: v ↦ A v.
        rmatvec: u ↦ Aᵀ u.
        columns: shapes and dtypes of v, a pytree of `jax.ShapeDtypeStruct`.
        rows: shapes and dtypes of A v, likewise.
    """

    matvec: Callable[[Vector], Vector]
    rmatvec: Callable[[Vector], Vector]
    columns: PyTree[jax.ShapeDtypeStruct]
    rows: PyTree[jax.ShapeDtypeStruct]

    @property
    def T(self) -> LinearOperator:
        """The transpose, Aᵀ."""
        return LinearOperator(self.rmatvec, self.matvec, self.rows, self.columns)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns, as if A were a matrix."""
        return _vector.size(self.rows), _vector.size(self.columns)


def structure(tree: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a tree of arrays, or of things that have both."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def transpose(apply: Callable[[Vector], Vector], columns: PyTree) -> Callable[[Vector], Vector]:
    """The function u ↦ Aᵀu for v ↦ A v."""
    # A `jax.custom_vjp` has a derivative, but no transpose.
    if has_custom_vjp(jax.make_jaxpr(apply)(columns).jaxpr):
        return lambda u: jax.vjp(apply, _vector.zeros_like(columns))[1](u)[0]
    return lambda u: jax.linear_transpose(apply, columns)(u)[0]
