"""Two ways to solve for a Gauss-Newton step: with rows stored, or with products alone."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from scipy import optimize

from constrainx.linalg import Solver
from constrainx.polishing._system import ROUNDS, Given, Step, System

# Rows that are stored: how many, how many entries, and how much work their decomposition is.
MOST_ROWS, MOST_ENTRIES, MOST_WORK = 2**10, 2**25, 2**34
# Singular values below this many roundings of the largest are noise.
NOISE = 4.0
# Random directions that the lengths of rows are estimated by.
PROBES = 4


class Lengths(NamedTuple):
    """What is known of the rows before the first step.

    Attributes:
        rows: the root mean square of the lengths of each constraint's rows.
        outputs: that of the outputs to be kept.
        noise: for each constraint, how much its rows change, as a root mean square, if each
            parameter changes in its last digit.
    """

    rows: tuple[float, ...]
    outputs: float
    noise: tuple[float, ...]


class Steps(Protocol):
    """How steps are found."""

    is_exact: bool

    def measure(self, moved: list[Array], given: Given) -> Lengths:
        """The lengths of rows."""
        ...

    def take(self, moved: list[Array], given: Given, damping: float) -> Step:
        """The step from a point."""
        ...


def fits(rows: int, columns: int) -> bool:
    """Whether rows, with the outputs to be kept, are few enough to store."""
    work = rows * columns * min(rows, columns)
    return rows <= MOST_ROWS and rows * columns <= MOST_ENTRIES and work <= MOST_WORK


class StoredSteps:
    """Computes all gradients, and solves in float64 by singular values.

    Directions that rounding hides are left out, so the rank of the rows does not matter.
    """

    is_exact = True

    def __init__(self, system: System) -> None:
        self._system = system
        self._differentiate = jax.jit(system.differentiate)
        self._last: tuple[Any, Any] | None = None

    def measure(self, moved: list[Array], given: Given) -> Lengths:
        """From the gradients."""
        values, gradients = self._find(moved, given)
        flat = np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in moved])
        eps = _find_eps(moved)
        squares = np.sum(np.square(gradients), axis=1)
        wobble = eps**2 * (np.square(gradients) @ np.square(flat))
        starts = np.cumsum([0, *map(len, values)])
        parts = [slice(a, b) for a, b in itertools.pairwise(starts)]
        lengths = [float(np.sqrt(np.mean(squares[p]))) if p.stop > p.start else 0.0 for p in parts]
        noise = [float(np.sqrt(np.mean(wobble[p]))) if p.stop > p.start else 0.0 for p in parts]
        return Lengths(tuple(lengths[:-1]), lengths[-1], tuple(noise[:-1]))

    def take(self, moved: list[Array], given: Given, damping: float) -> Step:
        """The step, with inequalities that it would break."""
        values, gradients = self._find(moved, given)
        system = self._system
        scales = [float(scale) for scale in given.scales]
        kinds = [member.kind == "inequality" for member in system.members]
        rows = np.concatenate(values[:-1]).astype(np.float64)
        weights = np.repeat(scales[:-1], list(map(len, values[:-1])))
        inequality = np.repeat(np.asarray(kinds, bool), list(map(len, values[:-1])))
        jacobian, kept = np.split(gradients, [len(rows)])
        jacobian, kept = jacobian * weights[:, None], kept * scales[-1]
        rows = rows * weights
        if system.is_hard and given.kept is not None:
            before = np.concatenate(
                [np.asarray(leaf, np.float64).reshape(-1) for leaf in given.kept]
            )
            rows = np.concatenate([rows, (values[-1] - before) * scales[-1]])
            jacobian, kept = np.concatenate([jacobian, kept]), kept[:0]
            inequality = np.concatenate([inequality, np.zeros(len(before), bool)])
        solve = Dense(jacobian, kept, rounding=_find_eps(moved))
        violated = ~inequality | (rows > 0)
        active = solve.find_active(rows, inequality) if inequality.any() else violated
        change = solve.step(rows, active, damping)
        for _ in range(ROUNDS):
            broken = inequality & ~active & (rows + jacobian @ change > 1e-9 * np.abs(rows).max())
            if not broken.any():
                break
            active = active | broken
            change = solve.step(rows, active, damping)
        wanted = np.where(violated, rows, 0)
        size = float(wanted @ wanted)
        descent = -float(wanted @ (jacobian @ change)) / size if size else 0.0
        ends = np.cumsum([math.prod(leaf.shape) for leaf in moved])[:-1]
        parts = zip(np.split(change, ends), moved, strict=True)
        leaves: Any = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in parts]
        return Step(leaves, descent, converged=True, iterations=1)

    def _find(self, moved: list[Array], given: Given) -> tuple[list[np.ndarray], np.ndarray]:
        """Values and gradients, in float64, of the last point that was asked for."""
        if self._last is None or self._last[0] is not moved:
            values, gradients = jax.device_get(self._differentiate(moved, given))
            count = sum(map(len, values))
            flat = [np.asarray(leaf, np.float64).reshape(count, -1) for leaf in gradients]
            self._last = moved, (values, np.concatenate(flat, axis=1))
        return self._last[1]


class Dense:
    """Solves min ‖Δ‖² + ‖K Δ‖² under J Δ = −c with matrices, for any choice of rows.

    In the basis of all rows, and in coordinates in which what is to be small is a norm.
    """

    def __init__(
        self,
        jacobian: Float[np.ndarray, "rows columns"],
        kept: Float[np.ndarray, "outputs columns"],
        *,
        rounding: float,
    ) -> None:
        self._rounding = rounding
        both = np.concatenate([jacobian, kept])
        if both.shape[0] < both.shape[1]:
            self._basis, _ = np.linalg.qr(both.T)
        else:
            self._basis = np.eye(both.shape[1])
        whiten = np.eye(self._basis.shape[1])
        if len(kept):
            _, sizes, right = np.linalg.svd(kept @ self._basis, full_matrices=False)
            whiten -= (right.T * (1 - 1 / np.sqrt(1 + sizes**2))) @ right
        self._whiten = whiten
        self._rows = (jacobian @ self._basis) @ whiten

    def find_active(
        self, rows: Float[np.ndarray, " rows"], inequality: Bool[np.ndarray, " rows"]
    ) -> Bool[np.ndarray, " rows"]:
        """The rows that are active in the quadratic program, by non-negative least squares.

        After Lawson and Hanson: of all z with R z ≥ h, the shortest follows from the u ≥ 0 that
        minimises ‖Rᵀu‖² + (hᵀu − 1)², and the rows with u > 0 are active. Equalities are solved
        first. Where no step obeys all inequalities, those that are violated count as equalities.
        """
        violated = ~inequality | (rows > 0)
        left, sizes, right = self._decompose(self._rows[~inequality])
        start = -right.T @ ((left.T @ rows[~inequality]) / sizes)
        wanted = rows[inequality] + self._rows[inequality] @ start
        free = self._rows[inequality] - (self._rows[inequality] @ right.T) @ right
        scale = np.abs(wanted).max()
        if not scale > 0 or not np.isfinite(scale):
            return violated
        stacked = np.concatenate([-free.T, wanted[None] / scale])
        try:
            weights, left_over = optimize.nnls(stacked, np.eye(len(stacked))[-1])
        except RuntimeError:  # it did not converge
            return violated
        if left_over < 1e-9:
            return violated
        active = ~inequality
        active[inequality] = weights > 0
        return active

    def _decompose(
        self, rows: Float[np.ndarray, "rows columns"]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Singular vectors and values, without those that are rounding."""
        left, sizes, right = np.linalg.svd(rows, full_matrices=False)
        largest = float(sizes[0]) if len(sizes) else 0.0
        known = sizes > NOISE * self._rounding * math.sqrt(len(sizes) or 1) * largest
        return left[:, known], sizes[known], right[known]

    def step(
        self, rows: Float[np.ndarray, " rows"], active: Bool[np.ndarray, " rows"], damping: float
    ) -> Float[np.ndarray, " columns"]:
        """The step for some of the rows."""
        left, sizes, right = self._decompose(self._rows[active])
        inside = right.T @ ((left.T @ -rows[active]) / (sizes + damping**2 / sizes))
        return self._basis @ (self._whiten @ inside)


class IterativeSteps:
    """Solves with products alone, by `lstsq`, for rows that are too many to store."""

    is_exact = False

    def __init__(self, system: System, solver: Solver) -> None:
        self._step = jax.jit(
            lambda moved, given, damping: system.step(moved, given, damping, solver)
        )
        self._push = jax.jit(system.push)

    def measure(self, moved: list[Array], given: Given) -> Lengths:
        """From products with random directions."""
        generator, eps = np.random.default_rng(0), _find_eps(moved)
        drawn = [
            [generator.normal(size=leaf.shape).astype(leaf.dtype) for leaf in moved]
            for _ in range(PROBES)
        ]
        signs = [generator.choice([-eps, eps], size=leaf.shape) for leaf in moved]
        last = [
            (sign * np.asarray(leaf)).astype(leaf.dtype)
            for sign, leaf in zip(signs, moved, strict=True)
        ]
        *found, wobble = jax.device_get(self._push(moved, [*drawn, last], given))
        totals = np.sqrt(np.mean(np.asarray(found, np.float64), axis=0))
        noise = np.sqrt(np.asarray(wobble, np.float64))
        return Lengths(tuple(map(float, totals[:-1])), float(totals[-1]), tuple(noise[:-1]))

    def take(self, moved: list[Array], given: Given, damping: float) -> Step:
        """By iterations."""
        dtype = jnp.result_type(jnp.float32, *moved)
        return self._step(moved, given, np.asarray(damping, dtype))


def _find_eps(moved: list[Array]) -> float:
    return float(jnp.finfo(jnp.result_type(jnp.float32, *moved)).eps)
