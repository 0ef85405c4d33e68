"""One row for all residuals: their root mean square."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from constrainx.constraints.reductions._clipped import Clipped
from constrainx.constraints.reductions._flatten import flatten
from constrainx.constraints.reductions._reduction import Reduction, Rows


@dataclasses.dataclass(frozen=True)
class RootMeanSquare:
    """One row: the root mean square of all residuals. ``reduce="rms"`` is short for it."""

    nonnegative: ClassVar[bool] = True

    def __call__(self, residual: PyTree, *, key: Array) -> Rows:  # noqa: ARG002
        """Returns the root mean square as a vector with one entry."""
        return root_mean_square(flatten(residual))[None]

    def for_inequality(self) -> Reduction:
        """Returns the root mean square of max(r, 0)."""
        return Clipped(self)


def root_mean_square(entries: Float[Array, " n"]) -> Float[Array, ""]:
    """Returns √mean(e²), with the gradient zero where all entries are zero; NaN stays NaN."""
    square = jnp.mean(jnp.square(entries))
    # The square root has an infinite slope at zero; a second `where` inside it keeps the NaN that
    # 0 · ∞ is out of the gradient. The test is for zero itself, since NaN > 0 is false.
    is_zero = square == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, square)))
