"""The linearised constraints of a step, and corrections that make a vector obey them.

For a vector v, rows with Jacobian J and targets t, and a diagonal metric D,

    v' = argmin ‖v' − v‖²_{D⁻¹}  subject to  J v' = t
       = v − D Jᵀλ,    (J D Jᵀ) λ = J v − t.

Inequalities make that a quadratic program with λ ≥ 0 for their rows and J v' ≤ t.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from constrainx.constraints import Composed, Member, cut_batch
from constrainx.errors import ArgumentError
from constrainx.linalg import LSMR, Solver, lstsq, norm
from constrainx.step._jacobian import RowJacobian, rows_of, rows_of_slices, stack_rows
from constrainx.step._method import Point
from constrainx.step._multipliers import active_rows, solve_gram
from constrainx.step._rows import Rows

log = logging.getLogger("constrainx")

SolverChoice: TypeAlias = Literal["auto", "gram"] | Solver

# Measured by `python -m benchmarks crossover`: below, a backward pass for each row in one batch is
# faster than the iterations of LSMR; and gradients of all rows should fit beside the model.
ROWS_WITH_STORED_GRADIENTS = 8
# Only the Gram matrix gives the exact active set of inequalities, which is worth more.
ROWS_WITH_INEQUALITIES = 64
BYTES_OF_STORED_GRADIENTS = 2**31
# In training, a step need not be more exact than the linearisation it is based on. What it leaves
# undone may be this part of γ c, so that the tolerance follows the violation, down to rtol.
INEXACT = LSMR(rtol=1e-3)
UNDONE = 0.02


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
    """

    vector: PyTree
    rows: Rows
    before: Float[Array, " rows"]
    after: Float[Array, " rows"]
    multipliers: Float[Array, " rows"] | None
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]


class System(Protocol):
    """Rows linearised at a point: their values, and corrections of a vector."""

    @property
    def values(self) -> Float[Array, " rows"]:
        """The values c."""
        ...

    def correct(self, vector: PyTree, rows: Rows, metric: PyTree | None = None) -> Correction:
        """The nearest vector for which the rows are what is asked of them."""
        ...

    def leave(self, vector: PyTree, rows: Rows) -> Correction:
        """The same vector, in the form of a correction, where no row acts."""
        ...


class GramSystem(NamedTuple):
    """By the Gram matrix J D Jᵀ; exact, also for inequalities."""

    jacobian: RowJacobian

    @property
    def values(self) -> Float[Array, " rows"]:
        """The values c."""
        return self.jacobian.values

    def correct(self, vector: PyTree, rows: Rows, metric: PyTree | None = None) -> Correction:
        """Solves the small dense problem."""
        # The vector is needed twice. Without the barrier XLA computes its last part twice, too,
        # with a pass over memory for each.
        vector = jax.lax.optimization_barrier(vector)
        gram = self.jacobian.gram(metric)
        before = self.jacobian.matvec(vector)
        excess = before - rows.target
        active = active_rows(gram, excess, rows.acts, rows.inequality)
        multipliers = solve_gram(gram, excess, active)
        change = self.jacobian.rmatvec(multipliers)
        if metric is not None:
            change = jax.tree.map(jnp.multiply, metric, change)
        return Correction(
            vector=_subtract(vector, change),
            rows=rows,
            before=before,
            # J v' without another pass over the parameters.
            after=before - jnp.matmul(gram, multipliers, precision="highest"),
            multipliers=multipliers,
            iterations=jnp.ones((), jnp.int32),
            converged=jnp.all(jnp.isfinite(multipliers)),
        )

    def leave(self, vector: PyTree, rows: Rows) -> Correction:
        """The same vector."""
        return _leave(vector, rows, jnp.zeros_like(rows.values))


class IterativeSystem(NamedTuple):
    """By a matrix-free least-squares solver; inequalities in one pass."""

    values: Float[Array, " rows"]
    linear: Callable[[PyTree], Float[Array, " rows"]]
    parameters: PyTree
    solver: Solver | None

    def correct(self, vector: PyTree, rows: Rows, metric: PyTree | None = None) -> Correction:
        """Iterates; as exactly as the linearisation deserves, unless a solver was given."""
        before = self.linear(_cast(vector, self.parameters))
        excess = before - rows.target
        # Rows act if they would be violated without the correction.
        weights = (rows.acts & (~rows.inequality | (excess > 0))).astype(excess.dtype)
        roots = None if metric is None else jax.tree.map(jnp.sqrt, metric)
        inexact = self.solver is None
        change, info = lstsq(
            lambda v: weights * self.linear(v),
            weights * excess,
            like=self.parameters,
            preconditioner=roots,
            reference=UNDONE / INEXACT.rtol * norm(weights * rows.target) if inexact else None,
            solver=INEXACT if self.solver is None else self.solver,
        )
        return Correction(
            vector=_subtract(vector, change),
            rows=rows,
            before=before,
            after=before - self.linear(change),
            multipliers=None,
            iterations=jnp.asarray(info.iterations, jnp.int32),
            converged=jnp.asarray(info.converged),
        )

    def leave(self, vector: PyTree, rows: Rows) -> Correction:
        """The same vector."""
        return _leave(vector, rows, None)


def _leave(vector: PyTree, rows: Rows, multipliers: Array | None) -> Correction:
    nothing = jnp.zeros_like(rows.values)
    return Correction(
        vector=vector,
        rows=rows,
        before=nothing,
        after=nothing,
        multipliers=multipliers,
        iterations=jnp.zeros((), jnp.int32),
        converged=jnp.array(True),
    )


def linearise(point: Point, solver: SolverChoice, counts: tuple[int, ...]) -> System:
    """The rows of all constraints at a point, once for all stages of a step.

    A step at which no constraint acts costs a forward pass, to know the violations.

    Args:
        point: where.
        solver: "auto", "gram", or a least-squares solver.
        counts: how many rows each constraint has.
    """
    route = pick_route(solver, point.constraints, counts, point.parameters)
    arguments = _arguments(point)

    def function(p: PyTree) -> Float[Array, " rows"]:
        return jnp.concatenate([member.rows(p, *inputs) for member, *inputs in arguments])

    if route == "iterative":
        values, linear = jax.linearize(function, point.parameters)
        chosen = None if isinstance(solver, str) else solver
        return IterativeSystem(values, linear, point.parameters, chosen)

    def differentiate() -> RowJacobian:
        return stack_rows([_jacobian(point.parameters, *argument) for argument in arguments])

    def evaluate_alone() -> RowJacobian:
        blank = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(differentiate)
        )
        return dataclasses.replace(blank, values=function(point.parameters))

    acts = any_acts(point)
    if acts is None:
        return GramSystem(differentiate())
    return GramSystem(jax.lax.cond(acts, differentiate, evaluate_alone))


def any_acts(point: Point) -> Bool[Array, ""] | None:
    """Whether any constraint acts at this step, or None if one always does."""
    if any(member.start == 0 and member.every == 1 for member in point.constraints):
        return None
    return jnp.any(jnp.stack([member.acts_at(point.step) for member in point.constraints]))


def count_rows(point: Point) -> tuple[int, ...]:
    """How many rows each constraint has."""

    def count(member: Member, batch: Any, key: Array, model: Any) -> int:
        rows = jax.eval_shape(lambda p: member.rows(p, batch, key, model), point.parameters)
        return rows.shape[0]

    return tuple(count(*argument) for argument in _arguments(point))


def pick_route(
    solver: SolverChoice, constraints: Composed, counts: tuple[int, ...], parameters: PyTree
) -> Literal["gram", "iterative"]:
    """Closed form for one row, Gram matrix for few rows or rows on disjoint examples, else LSMR."""
    if not isinstance(solver, str):
        return "iterative"
    check_solver(solver)
    shared = sum(n for m, n in zip(constraints, counts, strict=True) if m.slices is None)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parameters))
    exact = any(member.kind == "inequality" for member in constraints)
    most = ROWS_WITH_INEQUALITIES if exact else ROWS_WITH_STORED_GRADIENTS
    few = shared <= most and shared * size <= BYTES_OF_STORED_GRADIENTS
    pick: Literal["gram", "iterative"] = "gram" if solver == "gram" or few else "iterative"
    form = "closed form" if sum(counts) == 1 else "Gram matrix"
    log.info(
        "%d rows from %s: %s", sum(counts), ", ".join(constraints.names),
        form if pick == "gram" else f"iterations of {INEXACT}",
    )  # fmt: skip
    return pick


def check_solver(solver: Any) -> None:
    """Raises unless it is one of the names, or has the method that a solver has."""
    if solver not in ("auto", "gram") and not isinstance(solver, Solver):
        raise ArgumentError(
            f'`solver` must be "auto", "gram" or a least-squares solver, got {solver!r}.'
        )


def _arguments(point: Point) -> list[tuple[Member, Any, Array, Any]]:
    keys = point.constraints.keys(point.key)
    return [(m, point.batch, k, point.model) for m, k in zip(point.constraints, keys, strict=True)]


def _jacobian(
    parameters: PyTree, member: Member, batch: Any, key: Array, model: Any
) -> RowJacobian:
    batch = member.view(batch)
    if member.slices is None:
        return rows_of(lambda p: member.function(p, batch, key, model), parameters)
    pieces = cut_batch(batch, key, member.slices(batch))
    return rows_of_slices(
        lambda p, piece: member.function(p, piece[0], piece[1], model)[0], parameters, pieces
    )


def _subtract(vector: PyTree, change: PyTree) -> PyTree:
    return jax.tree.map(lambda v, d: v - d.astype(v.dtype), vector, change)


def _cast(vector: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda v, p: v.astype(p.dtype), vector, like)
