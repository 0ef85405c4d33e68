"""Norms of what exceeds zero, for inequalities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from constrainx.constraints.reductions._reduction import Reduction, Rows, slices_of


@dataclasses.dataclass(frozen=True)
class Clipped:
    """Replaces the residual r by max(r, 0) before another reduction.

    For inequalities r ≤ 0. A norm of r itself is zero on the boundary alone, so it would pull
    feasible points there; the norm of max(r, 0) is zero wherever the inequality holds. Such a row
    does not foresee a violation, as it has no gradient before there is one.

    Attributes:
        base: the reduction of the clipped residual.
    """

    base: Reduction

    def __call__(self, residual: PyTree, *, key: Array) -> Rows:
        """Returns the rows of the clipped residual."""
        return self.base(jax.tree.map(lambda leaf: jnp.maximum(leaf, 0), residual), key=key)

    @property
    def slices(self) -> Callable[[PyTree], int] | None:
        """The slices of the base."""
        return slices_of(self.base)

    def for_inequality(self) -> Reduction:
        """Returns itself."""
        return self
