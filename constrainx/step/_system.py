"""The linearised constraints of a step, and corrections that make a vector obey them.

For a vector v, rows with Jacobian J and targets t, a diagonal metric D, and P for the parameters
that the rows may move,

    v' = argmin ‖v' − v‖²_{D⁻¹}  subject to  J v' = t,  v' = v outside of P
       = v − P D Jᵀλ,    (J P D Jᵀ) λ = J v − t.

Inequalities make that a quadratic program with λ ≥ 0 for their rows and J v' ≤ t. Where v is a
gradient, all of this is asked of −v.

Soft rows have an unknown s of their own, at a price: ‖v' − v‖²_{D⁻¹} + ‖s‖² is smallest subject to
J v' = t + √m s, so that (J P D Jᵀ + m) λ = J v − t, and J v' = t + m λ. Here m is the damping μ in
units of the mean squared length of the rows of the same constraint.
"""

from __future__ import annotations

import operator
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from constrainx.step._rows import Rows

# A row whose gradient is rounding alone asks for a step as long as one over the rounding. Longer
# than this part of that, in units of the parameters, no linearisation means anything.
LONGEST_STEP = 1e-3


class Correction(NamedTuple):
    """A vector after it was made to obey the rows.

    Attributes:
        vector: v'.
        rows: what was asked.
        before: J v.
        after: J v'.
        multipliers: λ, or None if the solver was iterative.
        iterations: of the solver.
        converged: whether it did.
        slack: what the solver may leave of a row that it can serve, in the units of that row.
        yielded: m λ, what soft rows keep of what they ask for; zero for hard ones.
    """

    vector: PyTree
    rows: Rows
    before: Float[Array, " rows"]
    after: Float[Array, " rows"]
    multipliers: Float[Array, " rows"] | None
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]
    slack: Float[Array, " rows"]
    yielded: Float[Array, " rows"]


class System(Protocol):
    """Rows linearised at a point: their values, and corrections of a vector."""

    @property
    def values(self) -> Float[Array, " rows"]:
        """The values c."""
        ...

    def correct(
        self, vector: PyTree, rows: Rows, parameters: PyTree, metric: PyTree | None = None
    ) -> Correction:
        """The nearest vector for which the rows are what is asked of them."""
        ...

    def leave(self, vector: PyTree, rows: Rows) -> Correction:
        """The same vector, in the form of a correction, where no row acts."""
        ...


def measure_longest(
    excess: Float[Array, " rows"],
    lengths: Float[Array, " rows"],
    rows: Rows,
    active: Bool[Array, " rows"],
) -> Float[Array, ""]:
    """The longest of the steps that single rows ask for."""
    asked = jnp.where(rows.inequality, jnp.maximum(excess, 0), jnp.abs(excess))
    counts = active & (lengths > 0)
    return jnp.max(jnp.where(counts, asked, 0) / jnp.where(counts, lengths, 1), initial=0)


def leave(vector: PyTree, rows: Rows, multipliers: Array | None) -> Correction:
    """The same vector, in the form of a correction."""
    nothing = jnp.zeros_like(rows.values)
    return Correction(
        vector=vector,
        rows=rows,
        before=nothing,
        after=nothing,
        multipliers=multipliers,
        iterations=jnp.zeros((), jnp.int32),
        converged=jnp.array(True),
        slack=nothing,
        yielded=nothing,
    )


def subtract(vector: PyTree, change: PyTree, sign: int) -> PyTree:
    """The difference v − sign · change."""
    apply = operator.sub if sign > 0 else operator.add
    return jax.tree.map(lambda v, d: apply(v, d.astype(v.dtype)), vector, change)
