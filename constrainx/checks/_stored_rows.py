"""Rows few enough to store: everything about them comes from dense linear algebra in float64."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree
from scipy import optimize

from constrainx.checks._geometry import (
    ROUNDING,
    Rank,
    flatten_entries,
    measure_eps,
    stack_rows,
    sum_shares,
)
from constrainx.step import Point, pull_rows

# Rows that are computed at a time.
TOGETHER = 32


@dataclasses.dataclass(frozen=True, eq=False)
class StoredRows:
    """Rows as coordinates in an orthonormal basis, in float64.

    Attributes:
        values: c.
        lengths: of the rows.
        coordinates: a column for each row, at unit length; zero for one without gradient.
        gradient: that of the loss in the same basis, or None.
        gradient_length: its length, including the part outside of the basis.
        inequality: which rows are inequalities.
        rounding: what singular values may be off by, relative to the largest.
        how: how it was computed.
    """

    values: Float[np.ndarray, " rows"]
    lengths: Float[np.ndarray, " rows"]
    coordinates: Float[np.ndarray, "basis rows"]
    gradient: Float[np.ndarray, " basis"] | None
    gradient_length: float
    inequality: Bool[np.ndarray, " rows"]
    rounding: float
    how: str = "exactly, from all rows in float64"

    @classmethod
    def at(
        cls, point: Point, inequality: Bool[np.ndarray, " rows"], gradient: PyTree | None
    ) -> StoredRows:
        """Computes all rows, a few at a time."""
        values, jacobian = _compute_rows(point)
        lengths = np.linalg.norm(jacobian, axis=1)
        unit = jacobian / np.where(lengths > 0, lengths, 1)[:, None]
        # One row that is not finite must not hide all others.
        unit[~np.isfinite(lengths)] = 0
        flat = None if gradient is None else flatten_entries(gradient)
        if unit.shape[0] < unit.shape[1]:
            basis, coordinates = np.linalg.qr(unit.T)
            along = None if flat is None else basis.T @ flat
        else:
            coordinates, along = unit.T, flat
        return cls(
            values=values,
            lengths=lengths,
            coordinates=coordinates,
            gradient=along,
            gradient_length=0.0 if flat is None else float(np.linalg.norm(flat)),
            inequality=inequality,
            rounding=ROUNDING * measure_eps(point.parameters) * math.sqrt(len(values)),
        )

    def measure_rank(self, rows: Int[np.ndarray, " some"]) -> Rank:
        """From the singular values."""
        return Rank(len(self._decompose(rows)[1]), is_exact=True)

    def measure_condition(self, rows: Int[np.ndarray, " some"]) -> float:
        """From the singular values."""
        _, sizes, _ = self._decompose(rows)
        return float(sizes[0] / sizes[-1]) if len(sizes) else math.nan

    def count_directions(self, rows: Int[np.ndarray, " some"], damping: float) -> float:
        """From the singular values of the rows at their own length."""
        if damping == 0:
            return self.measure_rank(rows).value
        sizes = np.linalg.svd(self.coordinates[:, rows] * self.lengths[rows], compute_uv=False)
        return sum_shares(np.square(sizes), damping)

    def measure_share(self, rows: Int[np.ndarray, " some"]) -> float:
        """From a projection on the span."""
        if self.gradient is None or self.gradient_length == 0:
            return math.nan
        span, _, _ = self._decompose(rows)
        return min(float(np.linalg.norm(span.T @ self.gradient)) / self.gradient_length, 1.0)

    def find_undone(self, rows: Int[np.ndarray, " some"]) -> Float[np.ndarray, " some"]:
        """What a projection on the range leaves, with the best slack of the inequalities."""
        wanted = self.values[rows] / np.where(self.lengths[rows] > 0, self.lengths[rows], 1)
        _, _, range_of = self._decompose(rows)
        inequality = self.inequality[rows]

        def project_off(vector: np.ndarray) -> np.ndarray:
            return vector - range_of @ (range_of.T @ vector)

        if not inequality.any():
            return project_off(wanted)
        slacks = project_off(np.eye(len(rows))[:, inequality])
        slack, _ = optimize.nnls(slacks, -project_off(wanted), maxiter=30 * len(rows))
        return project_off(wanted) + slacks @ slack

    def _decompose(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The singular value decomposition of the rows' columns, up to their rank."""
        left, sizes, right = np.linalg.svd(self.coordinates[:, rows], full_matrices=False)
        rank = int(np.sum(sizes > self.rounding * max(sizes[0], np.finfo(float).tiny)))
        return left[:, :rank], sizes[:rank], right[:rank].T


def _compute_rows(
    point: Point,
) -> tuple[Float[np.ndarray, " rows"], Float[np.ndarray, "rows columns"]]:
    @jax.jit
    def evaluate(parameters: PyTree) -> Array:
        return stack_rows(point, parameters)

    @jax.jit
    def pull(parameters: PyTree, cotangents: Array) -> PyTree:
        _, back = jax.vjp(lambda p: stack_rows(point, p), parameters)
        return pull_rows(back, cotangents)[0]

    values = evaluate(point.parameters)
    rows = values.shape[0]
    # The last chunk is padded, so that one compiled program serves all.
    together = min(TOGETHER, rows)
    parts = []
    for start in range(0, rows, together):
        cotangents = jnp.eye(together, rows, k=start, dtype=values.dtype)
        leaves = jax.tree.leaves(pull(point.parameters, cotangents))
        part = [np.asarray(leaf, np.float64).reshape(together, -1) for leaf in leaves]
        parts.append(np.concatenate(part, axis=1)[: rows - start])
    return np.asarray(values, np.float64), np.concatenate(parts)
