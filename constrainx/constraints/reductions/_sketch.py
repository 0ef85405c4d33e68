"""Random combinations of the residuals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from constrainx.constraints._numbers import as_count
from constrainx.constraints.reductions._flatten import flatten
from constrainx.constraints.reductions._reduction import Rows


@dataclasses.dataclass(frozen=True)
class Sketch:
    """Random signed combinations of all residuals: smooth at zero, as many as the user chooses.

    Row i is Σⱼ sᵢⱼ rⱼ / √(k n) for k rows, n entries and independent random signs s, new ones each
    step. All rows are zero for every draw of the signs if and only if the residual is, and the
    squared norm of the rows is the mean square of the residual in expectation. For equalities only:
    a combination with random signs does not tell r ≤ 0 from r ≥ 0.

    Attributes:
        rows: the number of combinations k.
    """

    rows: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", as_count(self.rows, argument="Sketch(rows=...)"))

    def __call__(self, residual: PyTree, *, key: Array) -> Rows:
        """Returns the combinations, with new signs for each key."""
        entries = flatten(residual)
        signs = jax.random.rademacher(key, (self.rows, entries.size), entries.dtype)
        return signs @ entries / jnp.sqrt(self.rows * entries.size).astype(entries.dtype)
