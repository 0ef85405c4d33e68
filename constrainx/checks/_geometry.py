"""Where the rows of constraints lie: their rank, their angle to a gradient, what they leave undone.

Rows are scaled to unit length, as the step does, so that their units do not matter. With unit rows
Ĵ and values ĉ = c / length, a step d that meets a set of equalities solves Ĵ d = −ĉ. What the best
step leaves is the part of ĉ outside of the range of Ĵ; for inequalities, Ĵ d ≤ −ĉ, there may be any
slack s ≥ 0 as well.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from constrainx.step import Point

# How many rounding errors a row of a Jacobian may be off by.
ROUNDING = 64


class Rank(NamedTuple):
    """A numerical rank; at least this, unless it is exact."""

    value: int
    is_exact: bool


class Geometry(Protocol):
    """What can be asked about rows, by their indices."""

    @property
    def values(self) -> Float[np.ndarray, " rows"]:
        """The values c."""
        ...

    @property
    def lengths(self) -> Float[np.ndarray, " rows"]:
        """The lengths of their gradients."""
        ...

    @property
    def how(self) -> str:
        """How it was computed, in words."""
        ...

    def measure_rank(self, rows: Int[np.ndarray, " some"]) -> Rank:
        """The numerical rank of these rows, at unit length."""
        ...

    def measure_condition(self, rows: Int[np.ndarray, " some"]) -> float:
        """Largest over smallest singular value of these rows, at unit length, within the rank."""
        ...

    def count_directions(self, rows: Int[np.ndarray, " some"], damping: float) -> float:
        """How many directions these rows hold: Σ σ²/(σ² + m), for singular values σ of J.

        This is the rank where m is zero. NaN if there are too many rows to tell.

        Args:
            rows: which.
            damping: m, in the units of a squared row.
        """
        ...

    def measure_share(self, rows: Int[np.ndarray, " some"]) -> float:
        """How much of the loss's gradient is in the span of these rows, from 0 to 1: a cosine."""
        ...

    def find_undone(self, rows: Int[np.ndarray, " some"]) -> Float[np.ndarray, " some"]:
        """What no step can take from these rows together, in units of their lengths."""
        ...


def stack_rows(point: Point, parameters: PyTree) -> Float[Array, " rows"]:
    """The rows of all constraints, whose derivative is by what each may move."""
    return jnp.concatenate(list(point.rows(parameters).values()))


def sum_shares(squares: Float[np.ndarray, " some"], damping: float) -> float:
    """Σ σ²/(σ² + m) of squared singular values, which rounding may have made negative."""
    squares = np.maximum(squares, 0)
    return float(np.sum(squares / (squares + damping)))


def flatten_entries(tree: PyTree) -> Float[np.ndarray, " entries"]:
    """All entries of a pytree in one vector in float64, on the host."""
    leaves = jax.tree.leaves(tree)
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in leaves])


def count_entries(tree: PyTree) -> int:
    """How many entries the arrays of a pytree have."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def measure_eps(tree: PyTree) -> float:
    """The distance from 1 to the next number, in the coarsest dtype of a pytree."""
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(tree))
