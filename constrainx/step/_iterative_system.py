"""The rows of a step solved by iterations, which need products with their Jacobian alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from constrainx.linalg import LSMR, Reason, Solver, dot, lstsq, norm
from constrainx.step._bounded import Bounded, solve_bounded
from constrainx.step._rows import Rows, spread
from constrainx.step._system import (
    LONGEST_STEP,
    Correction,
    leave,
    measure_longest,
    subtract,
)

# In training, a step need not be more exact than the linearisation it is based on. What it leaves
# undone may be this fraction of γ c, so that the tolerance follows the violation, down to rtol.
INEXACT = LSMR(rtol=1e-3)
UNDONE = 0.02
# What it may leave of any row, as a part of the largest that is asked, in rows of the same length.
INACCURATE = 20 * INEXACT.rtol
# How often it may solve for what is left, if single rows are further off than that.
ROUNDS = 3
# How many random vectors estimate the lengths of rows, and how many their mean square.
PROBES = 8


class Solved(NamedTuple):
    """What an iterative solver found.

    Attributes:
        change: D Jᵀλ.
        moved: J D Jᵀλ.
        yielded: m λ, what damping lets the rows keep of what they ask for.
        iterations: how many it took.
        converged: whether it did.
        undone: the norm of what a user's solver left of rows that it found compatible, in the units
            of each row.
    """

    change: PyTree
    moved: Float[Array, " rows"]
    yielded: Float[Array, " rows"]
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]
    undone: Float[Array, " rows"]


class IterativeSystem(NamedTuple):
    """Solves by a matrix-free least-squares solver.

    Attributes:
        values: c.
        linear: v ↦ J v.
        movable: which parameters the rows may move, P; None for all.
        counts: how many rows each constraint has.
        scales: what each row is divided by: the typical length of its constraint's rows, or its
            own if they are not alike.
        parameters: what a vector looks like.
        solver: the user's, or None for an inexact one.
    """

    values: Float[Array, " rows"]
    linear: Callable[[PyTree], Float[Array, " rows"]]
    movable: tuple[bool, ...] | None
    counts: tuple[int, ...]
    scales: Float[Array, " rows"]
    parameters: PyTree
    solver: Solver | None

    def correct(
        self, vector: PyTree, rows: Rows, parameters: PyTree, metric: PyTree | None = None
    ) -> Correction:
        """Iterates, no more exactly than the linearisation deserves, unless a solver was given.

        Which inequalities are active is found by projected conjugate gradients on the multipliers;
        the solver then makes equalities of them. If the first has not converged, or a row is left
        violated by more than the tolerance, ``converged`` is false.
        """
        cast = _cast(vector, self.parameters)
        before = rows.sign * self.linear(self._hold(cast) if rows.movable_alone else cast)
        excess = before - rows.target
        lengths = self.scales
        roots = self._find_damping(rows, metric)
        if np.any(rows.inequality):
            active, lengths, found = jax.lax.stop_gradient(
                self._find_active(excess, rows, roots, metric)
            )
            solved = self._solve(excess, rows, active, roots, metric, lengths)
            left = (excess - solved.moved - solved.yielded) / lengths
            violated = rows.acts & rows.inequality & (left > self._slack(excess / lengths))
            solved = solved._replace(
                iterations=solved.iterations + found.iterations,
                converged=solved.converged & found.converged & ~jnp.any(violated),
            )
        else:
            solved = self._solve(excess, rows, rows.acts, roots, metric, lengths)
        # The lengths of single rows are not known here, but that of the step is.
        bound = LONGEST_STEP / float(jnp.finfo(excess.dtype).eps)
        longest = bound * (1 + norm(parameters)) + 2 * norm(vector)
        is_sane = ~(norm(solved.change) > longest)
        solved = solved._replace(
            change=jax.tree.map(lambda leaf: jnp.where(is_sane, leaf, 0), solved.change),
            converged=solved.converged & is_sane,
        )
        return Correction(
            vector=subtract(vector, solved.change, rows.sign),
            rows=rows,
            before=before,
            after=before - jnp.where(is_sane, solved.moved, 0),
            multipliers=None,
            iterations=solved.iterations,
            converged=solved.converged,
            # A user's solver may leave more; and ten per cent for rounding.
            slack=INACCURATE * lengths * measure_longest(excess, lengths, rows, rows.acts)
            + 1.1 * solved.undone,
            yielded=jnp.where(is_sane, solved.yielded, 0),
        )

    def leave(self, vector: PyTree, rows: Rows) -> Correction:
        """The same vector."""
        return leave(vector, rows, None)

    def _find_damping(self, rows: Rows, metric: PyTree | None) -> Float[Array, " rows"] | None:
        """√m of each row, or None if all are hard.

        The mean squared length of up to 8 rows is exact. Of more it is an estimate, with a standard
        deviation of at most a half, where all rows are parallel, and less the more they differ.
        """
        if rows.damping is None:
            return None
        transpose = jax.linear_transpose(self.linear, self.parameters)

        def measure(weights: Float[Array, " rows"]) -> Float[Array, ""]:
            gradient = self._hold(transpose(weights)[0])
            scaled = gradient if metric is None else jax.tree.map(jnp.multiply, metric, gradient)
            return dot(gradient, scaled).astype(weights.dtype)

        means = []
        for index, count in enumerate(self.counts):
            # Of unit length and orthogonal to each other, so that as many as rows miss nothing.
            drawn = jax.random.normal(jax.random.key(0), (count, min(count, PROBES)))
            directions = jnp.linalg.qr(drawn)[0].T.astype(self.values.dtype)
            start = sum(self.counts[:index])
            blank = jnp.zeros((len(directions), len(self.values)), directions.dtype)
            probes = blank.at[:, start : start + count].set(directions)
            means.append(jnp.mean(jax.lax.map(measure, probes)))
        positive = [mean > 0 for mean in means]
        lengths = [jnp.sqrt(jnp.where(p, m, 1)) * p for p, m in zip(positive, means, strict=True)]
        # The root of μ has no derivative at zero, and a derivative there is not a number. Those
        # with respect to all else are right.
        return jnp.sqrt(rows.damping) * spread(lengths, self.counts)

    def _find_active(
        self,
        excess: Float[Array, " rows"],
        rows: Rows,
        roots: Float[Array, " rows"] | None,
        metric: PyTree | None,
    ) -> tuple[Bool[Array, " rows"], Float[Array, " rows"], Bounded]:
        """The rows that are active in the quadratic program, and the length of every row.

        In rows of unit length, so that their units do not matter; a row without a gradient has
        nothing to move.
        """
        lengths = self._estimate_lengths(metric)
        acts = rows.acts & (lengths > 0)
        lengths = jnp.where(lengths > 0, lengths, 1)
        weights = acts.astype(excess.dtype) / lengths
        transpose = jax.linear_transpose(self.linear, self.parameters)

        def apply(multipliers: Array) -> Array:
            change = self._hold(transpose(weights * multipliers)[0])
            if metric is not None:
                change = jax.tree.map(jnp.multiply, metric, change)
            moved = weights * self.linear(change)
            return moved if roots is None else moved + jnp.square(weights * roots) * multipliers

        asked = jnp.where(rows.inequality, jnp.maximum(excess, 0), excess)
        found = solve_bounded(
            apply,
            weights * excess,
            jnp.asarray(rows.inequality),
            tolerance=self._rtol * norm(weights * asked),
            max_iterations=getattr(self.solver, "max_iterations", None) or 100 + 10 * excess.size,
        )
        return acts & found.active, lengths, found

    def _estimate_lengths(self, metric: PyTree | None) -> Float[Array, " rows"]:
        """The length of each row to a factor of two or so: ‖J_i‖² is the mean of (J_i z)²."""
        leaves, tree = jax.tree.flatten(self.parameters)

        def probe(key: Array) -> Float[Array, " rows"]:
            keys = jax.random.split(key, len(leaves))
            draws = [
                jax.random.normal(k, p.shape, p.dtype) for k, p in zip(keys, leaves, strict=True)
            ]
            vector = jax.tree.unflatten(tree, draws)
            if metric is not None:
                vector = jax.tree.map(lambda d, v: jnp.sqrt(d).astype(v.dtype) * v, metric, vector)
            return jnp.square(self.linear(self._hold(vector)))

        squares = jax.lax.map(probe, jax.random.split(jax.random.key(0), PROBES))
        return jnp.sqrt(jnp.mean(squares, axis=0))

    def _solve(
        self,
        excess: Array,
        rows: Rows,
        active: Bool[Array, " rows"],
        roots: Float[Array, " rows"] | None,
        metric: PyTree | None,
        scales: Float[Array, " rows"],
    ) -> Solved:
        targets = [norm(part) for part in self._split(jnp.where(active, rows.target, 0) / scales)]
        # The constraint that asks for the least sets the tolerance.
        tolerance = UNDONE * jnp.min(jnp.stack(targets))
        if self.solver is not None:
            solved, is_compatible = self._solve_once(excess, active, roots, metric, scales, None)
            # What a user's solver leaves within its own tolerance is the user's choice.
            return solved._replace(undone=jnp.where(is_compatible, solved.undone, 0))
        # A tolerance for the norm of all rows says little about one of many, so go on if one is
        # further off than it may be.
        longest = measure_longest(excess, scales, rows, active)
        allowed = INACCURATE * (jnp.abs(excess) / scales + longest)
        smallest = jnp.min(jnp.where(active, allowed, jnp.inf))

        def improve(solved: Solved, tolerance: Array) -> tuple[Solved, Bool[Array, ""]]:
            left = excess - solved.moved - solved.yielded
            more, is_compatible = self._solve_once(left, active, roots, metric, scales, tolerance)
            left -= more.moved + more.yielded
            is_short = jnp.any(active & (jnp.abs(left) / scales > allowed))
            total = more._replace(
                change=jax.tree.map(jnp.add, solved.change, more.change),
                moved=solved.moved + more.moved,
                yielded=solved.yielded + more.yielded,
                iterations=solved.iterations + more.iterations,
            )
            return total, is_short & is_compatible

        def go_round(
            carry: tuple[Solved, Bool[Array, ""]], tolerance: Array
        ) -> tuple[tuple[Solved, Bool[Array, ""]], None]:
            solved, goes_on = carry
            return jax.lax.cond(goes_on, lambda: improve(solved, tolerance), lambda: carry), None

        nothing = Solved(
            change=jax.tree.map(jnp.zeros_like, self.parameters),
            moved=jnp.zeros_like(excess),
            yielded=jnp.zeros_like(excess),
            iterations=jnp.zeros((), jnp.int32),
            converged=jnp.ones((), bool),
            undone=jnp.zeros_like(excess),
        )
        tolerances = jnp.stack([tolerance, *[smallest] * (ROUNDS - 1)])
        # A loop, so that the solver is compiled once.
        (solved, _), _ = jax.lax.scan(go_round, (nothing, jnp.ones((), bool)), tolerances)
        return solved._replace(undone=nothing.undone)

    def _solve_once(
        self,
        excess: Array,
        active: Bool[Array, " rows"],
        roots: Float[Array, " rows"] | None,
        metric: PyTree | None,
        scales: Float[Array, " rows"],
        tolerance: Array | None,
    ) -> tuple[Solved, Bool[Array, ""]]:
        """What the solver finds, and whether the rows are compatible.

        With a tolerance, the inexact solver may stop where the norm of all rows is below it. Soft
        rows have unknowns of their own, see `_system.py`.
        """
        weights = active.astype(excess.dtype) / scales
        preconditioner = None if metric is None else jax.tree.map(jnp.sqrt, metric)
        settings: dict[str, Any] = {
            "reference": None if tolerance is None else tolerance / INEXACT.rtol,
            "solver": INEXACT if self.solver is None else self.solver,
            "is_linear": True,
        }
        if roots is None:
            yielded = jnp.zeros_like(excess)
            change, info = lstsq(
                lambda v: weights * self.linear(self._hold(v)),
                weights * excess,
                like=self.parameters,
                preconditioner=preconditioner,
                **settings,
            )
        else:
            both = None if metric is None else (preconditioner, jnp.ones_like(excess))
            (change, own), info = lstsq(
                lambda v: weights * (self.linear(self._hold(v[0])) + roots * v[1]),
                weights * excess,
                like=(self.parameters, excess),
                preconditioner=both,
                **settings,
            )
            yielded = roots * own
        # If rows contradict each other, a solver stops for another reason: it cannot get closer.
        is_compatible = info.reason == Reason.RESIDUAL
        # A solver returns the last finite iterate, but a step that is partly known is no step.
        is_finite = info.reason != Reason.NOT_FINITE
        change = jax.tree.map(lambda leaf: jnp.where(is_finite, leaf, jnp.nan), change)
        change = self._hold(change)
        solved = Solved(
            change=change,
            moved=self.linear(change),
            yielded=yielded,
            iterations=jnp.asarray(info.iterations, jnp.int32),
            converged=jnp.asarray(info.converged),
            undone=scales * info.residual_norm.astype(excess.dtype),
        )
        return solved, is_compatible

    @property
    def _rtol(self) -> float:
        """The relative accuracy of a solve; a solver of a user's own may not say."""
        rtol = getattr(INEXACT if self.solver is None else self.solver, "rtol", 1e-5)
        return max(rtol, 10 * float(jnp.finfo(self.values.dtype).eps))

    def _slack(self, excess: Array) -> Array:
        """What an inexact solve may leave of rows of unit length."""
        return 10 * self._rtol * jnp.max(jnp.abs(excess))

    def _hold(self, vector: PyTree) -> PyTree:
        if self.movable is None:
            return vector
        leaves, tree = jax.tree.flatten(vector)
        held = [
            leaf if moves else jnp.zeros_like(leaf)
            for leaf, moves in zip(leaves, self.movable, strict=True)
        ]
        return jax.tree.unflatten(tree, held)

    def _split(self, rows: Array) -> list[Array]:
        ends = [sum(self.counts[: i + 1]) for i in range(len(self.counts))]
        return [rows[e - n : e] for e, n in zip(ends, self.counts, strict=True)]


def _cast(vector: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda v, p: v.astype(p.dtype), vector, like)
