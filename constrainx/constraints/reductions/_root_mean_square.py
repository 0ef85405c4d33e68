"""One row for all residuals: their root mean square."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from constrainx.constraints.reductions._clipped import Clipped
from constrainx.constraints.reductions._flatten import flatten
from constrainx.constraints.reductions._reduction import Reduction, Rows


@dataclasses.dataclass(frozen=True)
class RootMeanSquare:
    """One row: the root mean square of all residuals. ``reduce="rms"`` is short for it."""

    def __call__(self, residual: PyTree, *, key: Array) -> Rows:  # noqa: ARG002
        """Returns the root mean square as a vector with one entry."""
        return root_mean_square(flatten(residual))[None]

    def for_inequality(self) -> Reduction:
        """Returns the root mean square of max(r, 0)."""
        return Clipped(self)


def root_mean_square(entries: Float[Array, " n"]) -> Float[Array, ""]:
    """Returns √mean(e²), with the gradient zero where all entries are zero."""
    square = jnp.mean(jnp.square(entries))
    # The square root has an infinite slope at zero; `where` on both sides keeps NaN out.
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
