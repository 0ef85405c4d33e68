"""Too many rows to store: estimates from products with them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from constrainx.checks._geometry import (
    ROUNDING,
    Rank,
    count_entries,
    flatten_entries,
    measure_eps,
    stack_rows,
    sum_shares,
)
from constrainx.linalg import LSMR, lstsq, norm
from constrainx.step import Point

# Limits on the combinations of rows that are stored: entries in total, and how many.
MOST_ENTRIES = 2**26
MOST_COMBINATIONS = 256
# Rows whose Gram matrix is computed, by a product with J and its transpose for each.
MOST_IN_GRAM = 2048
# Products with random vectors that estimate the lengths of rows.
PROBES = 16


@dataclasses.dataclass(frozen=True, eq=False)
class ProbedRows:
    """Rows that are known only by products with them.

    Lengths come from products with random vectors, and ranks from as many random combinations of
    the rows as may be stored: an exact rank if it is below that number. Everything else uses LSMR.
    Inequalities count as equalities if they are violated, and not at all otherwise.
    """

    values: Float[np.ndarray, " rows"]
    lengths: Float[np.ndarray, " rows"]
    inequality: Bool[np.ndarray, " rows"]
    point: Point
    gradient: PyTree | None
    linear: Any
    transpose: Any
    how: str = "estimated, by random combinations of the rows and LSMR"

    @classmethod
    def at(
        cls, point: Point, inequality: Bool[np.ndarray, " rows"], gradient: PyTree | None
    ) -> ProbedRows:
        """Linearises once, and estimates lengths."""
        values, push = jax.linearize(lambda p: stack_rows(point, p), point.parameters)
        linear = jax.jit(push)
        transpose = jax.jit(lambda w: jax.linear_transpose(push, point.parameters)(w)[0])
        squares = np.zeros(values.shape)
        for index in range(PROBES):
            probe = _draw_like(point.parameters, jax.random.fold_in(point.key, index))
            squares += np.asarray(linear(probe), np.float64) ** 2
        return cls(
            values=np.asarray(values, np.float64),
            lengths=np.sqrt(squares / PROBES),
            inequality=inequality,
            point=point,
            gradient=gradient,
            linear=linear,
            transpose=transpose,
        )

    def measure_rank(self, rows: Int[np.ndarray, " some"]) -> Rank:
        """The rank, from random combinations of the rows."""
        columns = count_entries(self.point.parameters)
        many = min(len(rows), MOST_COMBINATIONS, max(MOST_ENTRIES // columns, 1))
        rng = np.random.default_rng(0)
        combined = []
        for _ in range(many):
            weights = np.zeros(len(self.values))
            weights[rows] = rng.normal(size=len(rows))
            combined.append(flatten_entries(self.transpose(self._scale(weights))))
        stacked = np.stack(combined)
        stacked /= np.maximum(np.linalg.norm(stacked, axis=1), np.finfo(float).tiny)[:, None]
        sizes = np.linalg.svd(stacked, compute_uv=False)
        eps = measure_eps(self.point.parameters)
        rank = int(np.sum(sizes > ROUNDING * eps * math.sqrt(many) * sizes[0]))
        return Rank(rank, is_exact=rank < many or many == len(rows))

    def measure_condition(self, rows: Int[np.ndarray, " some"]) -> float:
        """LSMR's estimate, from below."""
        _, info = self._solve(rows)
        return float(info.condition)

    def count_directions(self, rows: Int[np.ndarray, " some"], damping: float) -> float:
        """From the Gram matrix of the rows, in the precision of the network."""
        if len(rows) > MOST_IN_GRAM:
            return math.nan
        if damping == 0:
            return self.measure_rank(rows).value
        multiply = jax.jit(lambda weights: self.linear(self.transpose(weights)))
        columns = []
        for row in rows:
            weights = jnp.asarray(_mark(row, len(self.values)), self._dtype)
            columns.append(np.asarray(multiply(weights), np.float64)[rows])
        gram = np.stack(columns)
        return sum_shares(np.linalg.eigvalsh((gram + gram.T) / 2), damping)

    def measure_share(self, rows: Int[np.ndarray, " some"]) -> float:
        """The share, from the best combination of the rows."""
        if self.gradient is None:
            return math.nan
        weights = self._scale(_mark(rows, len(self.values)))
        length = float(norm(self.gradient))
        _, info = lstsq(
            lambda w: self.transpose(weights * w),
            self.gradient,
            like=jnp.zeros(len(self.values), self._dtype),
            solver=LSMR(rtol=1e-5),
            is_linear=True,
        )
        left = float(info.residual_norm) / length if length else math.nan
        return math.sqrt(max(1 - left**2, 0.0))

    def find_undone(self, rows: Int[np.ndarray, " some"]) -> Float[np.ndarray, " some"]:
        """What the best step leaves."""
        step, _ = self._solve(rows)
        weights = np.asarray(self._weigh(rows))
        left = weights * (self.values + np.asarray(self.linear(step), np.float64))
        return left[rows]

    def _solve(self, rows: np.ndarray) -> tuple[PyTree, Any]:
        weights = self._weigh(rows)
        return lstsq(
            lambda v: weights * self.linear(v),
            -weights * jnp.asarray(self.values, self._dtype),
            like=self.point.parameters,
            solver=LSMR(rtol=1e-5),
            is_linear=True,
        )

    def _weigh(self, rows: np.ndarray) -> Float[Array, " rows"]:
        counted = _mark(rows, len(self.values)) * (~self.inequality | (self.values > 0))
        return self._scale(counted)

    def _scale(self, weights: np.ndarray) -> Float[Array, " rows"]:
        lengths = np.where(self.lengths > 0, self.lengths, 1)
        return jnp.asarray(np.where(self.lengths > 0, weights / lengths, 0), self._dtype)

    @property
    def _dtype(self) -> Any:
        return jax.eval_shape(self.linear, self.point.parameters).dtype


def _mark(rows: np.ndarray, count: int) -> np.ndarray:
    marks = np.zeros(count)
    marks[rows] = 1
    return marks


def _draw_like(tree: PyTree, key: Array) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    drawn = [
        jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, drawn)
