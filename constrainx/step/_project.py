"""The null-space step: the smallest change of an update after which J u = −γ c.

For an update u, constraint values c with Jacobian J, and a diagonal metric D,

    u' = argmin ‖u' − u‖²_{D⁻¹}  subject to  J u' = −γ c
       = u − D Jᵀλ,    (J D Jᵀ) λ = J u + γ c.

Inequalities c ≤ 0 make that a quadratic program with λ ≥ 0 for their rows, J u' ≤ −γ c where c is
violated, and J u' ≤ −c, which the step may use up, where it is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from constrainx.constraints import Composed, Member, cut_batch
from constrainx.errors import ArgumentError
from constrainx.linalg import LSMR, Solver, lstsq, norm
from constrainx.step._jacobian import RowJacobian, rows_of, rows_of_slices, stacked
from constrainx.step._multipliers import active_rows, solve_gram

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


class Report(NamedTuple):
    """How one constraint fares in one step; scalars.

    Attributes:
        violation: the root mean square of its rows before the step.
        met: whether that is within its tolerance.
        resolved: whether the step does to first order what the constraint asks for. If not, another
            constraint contradicts it, or the solver did not converge.
        active: whether it acted in this step.
        iterations: of the least-squares solver.
        converged: whether the solver did.
    """

    violation: Float[Array, ""]
    met: Bool[Array, ""]
    resolved: Bool[Array, ""]
    active: Bool[Array, ""]
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]


class Projection(NamedTuple):
    """All there is to know about a step.

    Attributes:
        update: u'.
        rows: c, by constraint.
        multipliers: λ, by constraint; empty if the solver was iterative.
        reports: by constraint.
    """

    update: PyTree
    rows: dict[str, Float[Array, " rows"]]
    multipliers: dict[str, Float[Array, " rows"]]
    reports: dict[str, Report]


class Rows(NamedTuple):
    """What the step asks of each row: J u' = target, or ≤ for inequalities; None if it is idle."""

    values: Float[Array, " rows"]
    target: Float[Array, " rows"]
    acts: Bool[Array, " rows"]
    inequality: Bool[Array, " rows"]


class _Solved(NamedTuple):
    """A step: u', what was asked of the rows, J u, J u', and how it was found."""

    update: PyTree
    rows: Rows
    before: Float[Array, " rows"]
    after: Float[Array, " rows"]
    multipliers: Float[Array, " rows"] | None
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]


def project(
    update: PyTree,
    constraints: Composed,
    parameters: PyTree,
    *,
    batch: Any = None,
    key: Array | None = None,
    step: Int[Array, ""] | int = 0,
    model: Any = None,
    metric: PyTree | None = None,
    solver: SolverChoice = "auto",
) -> Projection:
    """Projects an update so that the constraints hold to first order after it.

    >>> import jax.numpy as jnp, constrainx as cx
    >>> on_circle = cx.compose(lambda p: jnp.sum(p**2) - 1.0, gamma=1.0)
    >>> step = cx.project(jnp.array([0.3, 0.1]), on_circle, jnp.array([1.0, 0.0]))
    >>> print(step.update)
    [0.  0.1]
    >>> print(step.multipliers["constraint"].round(3))
    [0.15]

    Args:
        update: what the optimizer wants to add to the parameters.
        constraints: from `compose`.
        parameters: where the constraints are linearised.
        batch: passed on to the constraints.
        key: for constraints that draw samples.
        step: for schedules.
        model: the model with its current state, if the constraints need one.
        metric: D, a pytree of positive weights like the parameters; None for the identity.
        solver: "auto", "gram", or a least-squares solver such as `LSMR(rtol=1e-4)`.
    """
    step = jnp.asarray(step, jnp.int32)
    keys = constraints.keys(key)
    arguments = [(member, batch, k, model) for member, k in zip(constraints, keys, strict=True)]
    counts = [_count(parameters, *argument) for argument in arguments]
    by_gram = _pick(solver, constraints, counts, parameters) == "gram"

    def function(p: PyTree) -> Float[Array, " rows"]:
        return jnp.concatenate([member.rows(p, *inputs) for member, *inputs in arguments])

    def asked(values: Float[Array, " rows"]) -> Rows:
        return _rows(constraints, counts, values, step)

    def act(update: PyTree) -> _Solved:
        if by_gram:
            jacobian = stacked([_jacobian(parameters, *argument) for argument in arguments])
            return _by_gram(update, jacobian, asked(jacobian.values), metric)
        return _by_iteration(update, function, parameters, asked, metric, solver)

    def rest(update: PyTree) -> _Solved:
        return _at_rest(update, asked(function(parameters)), by_gram)

    if any(member.start == 0 and member.every == 1 for member in constraints):
        solved = act(update)
    else:  # a step at which none acts costs a forward pass, to know the violations
        acts = jnp.any(jnp.stack([member.acts_at(step) for member in constraints]))
        solved = jax.lax.cond(acts, act, rest, update)
    multipliers = solved.multipliers
    return Projection(
        solved.update,
        _named(constraints, counts, solved.rows.values),
        {} if multipliers is None else _named(constraints, counts, multipliers),
        _reports(constraints, counts, solved),
    )


def _count(parameters: PyTree, member: Member, batch: Any, key: Array, model: Any) -> int:
    shape = jax.eval_shape(lambda p: member.rows(p, batch, key, model), parameters)
    return shape.shape[0]


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


def _pick(
    solver: SolverChoice, constraints: Composed, counts: list[int], parameters: PyTree
) -> Literal["gram", "iterative"]:
    """Closed form for one row, Gram matrix for few rows or rows on disjoint examples, else LSMR."""
    if not isinstance(solver, str):
        return "iterative"
    if solver not in ("auto", "gram"):
        raise ArgumentError(f'`solver` must be "auto", "gram" or a solver, got {solver!r}.')
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


def _rows(
    constraints: Composed, counts: list[int], values: Float[Array, " rows"], step: Array
) -> Rows:
    def spread(per_member: list[Array]) -> Array:
        return jnp.concatenate(
            [jnp.broadcast_to(v, (n,)) for v, n in zip(per_member, counts, strict=True)]
        )

    gamma = spread([m.gamma_at(step) for m in constraints]).astype(values.dtype)
    acts = spread([m.acts_at(step) for m in constraints])
    inequality = spread([jnp.asarray(m.kind == "inequality") for m in constraints])
    # A satisfied inequality may be used up, but not more.
    target = jnp.where(inequality & (values <= 0), -values, -gamma * values)
    return Rows(values, target, acts, inequality)


def _by_gram(update: PyTree, jacobian: RowJacobian, rows: Rows, metric: PyTree | None) -> _Solved:
    # The update is needed twice. Without the barrier XLA computes its last part twice, too, with a
    # pass over memory for each.
    update = jax.lax.optimization_barrier(update)
    gram = jacobian.gram(metric)
    before = jacobian.matvec(update)
    excess = before - rows.target
    active = active_rows(gram, excess, rows.acts, rows.inequality)
    multipliers = solve_gram(gram, excess, active)
    change = jacobian.rmatvec(multipliers)
    if metric is not None:
        change = jax.tree.map(jnp.multiply, metric, change)
    return _Solved(
        update=jax.tree.map(lambda u, d: u - d.astype(u.dtype), update, change),
        rows=rows,
        before=before,
        # J u' without another pass over the parameters.
        after=before - jnp.matmul(gram, multipliers, precision="highest"),
        multipliers=multipliers,
        iterations=jnp.ones((), jnp.int32),
        converged=jnp.all(jnp.isfinite(multipliers)),
    )


def _by_iteration(
    update: PyTree,
    function: Callable[[PyTree], Float[Array, " rows"]],
    parameters: PyTree,
    asked: Callable[[Float[Array, " rows"]], Rows],
    metric: PyTree | None,
    solver: SolverChoice,
) -> _Solved:
    values, linear = jax.linearize(function, parameters)
    rows = asked(values)
    before = linear(jax.tree.map(lambda u, p: u.astype(p.dtype), update, parameters))
    excess = before - rows.target
    # One pass over the inequalities: rows act if they would be violated without the projection.
    weights = (rows.acts & (~rows.inequality | (excess > 0))).astype(values.dtype)
    roots = None if metric is None else jax.tree.map(jnp.sqrt, metric)
    inexact = isinstance(solver, str)
    change, info = lstsq(
        lambda v: weights * linear(v),
        weights * excess,
        like=parameters,
        preconditioner=roots,
        reference=UNDONE / INEXACT.rtol * norm(weights * rows.target) if inexact else None,
        solver=INEXACT if isinstance(solver, str) else solver,
    )
    return _Solved(
        update=jax.tree.map(lambda u, d: u - d.astype(u.dtype), update, change),
        rows=rows,
        before=before,
        after=before - linear(change),
        multipliers=None,
        iterations=jnp.asarray(info.iterations, jnp.int32),
        converged=jnp.asarray(info.converged),
    )


def _at_rest(update: PyTree, rows: Rows, by_gram: bool) -> _Solved:
    nothing = jnp.zeros_like(rows.values)
    return _Solved(
        update=update,
        rows=rows,
        before=nothing,
        after=nothing,
        multipliers=nothing if by_gram else None,
        iterations=jnp.zeros((), jnp.int32),
        converged=jnp.array(True),
    )


def _named(constraints: Composed, counts: list[int], rows: Array) -> dict[str, Array]:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return {
        name: rows[end - count : end]
        for name, count, end in zip(constraints.names, counts, ends, strict=True)
    }


def _reports(
    constraints: Composed,
    counts: list[int],
    solved: _Solved,
) -> dict[str, Report]:
    rows = solved.rows
    inequality = rows.inequality
    violations = jnp.where(inequality, jnp.maximum(rows.values, 0), rows.values)
    missing = solved.after - rows.target
    missing = jnp.where(inequality, jnp.maximum(missing, 0), missing)
    stacked_parts = (violations, missing, rows.target, solved.before - rows.target, rows.acts)
    parts = [_named(constraints, counts, part) for part in stacked_parts]
    reports = {}
    for member in constraints:
        values, left, wanted, change, acts = (part[member.name] for part in parts)
        violation = jnp.sqrt(jnp.mean(jnp.square(values)))
        active = jnp.any(acts)
        # A tenth of γ c and of what counts as zero, and what an inexact solve leaves of J u + γ c.
        allowed = 0.1 * (norm(wanted) + member.tolerance * jnp.sqrt(values.size))
        allowed += 20 * INEXACT.rtol * norm(change)
        reports[member.name] = Report(
            violation=violation,
            met=violation <= member.tolerance,
            resolved=~active | (norm(left) <= allowed),
            active=active,
            iterations=solved.iterations,
            converged=solved.converged,
        )
    return reports
