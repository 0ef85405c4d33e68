"""`project`: the null-space step by itself, for one vector."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from constrainx.constraints import Composed, Member
from constrainx.step._iterative_system import INACCURATE
from constrainx.step._linearise import SolverChoice, any_acts, linearise, trace_members
from constrainx.step._method import Point, measure_excess
from constrainx.step._report import Report
from constrainx.step._rows import STAGES, Layout, Stage, check_overshoot
from constrainx.step._system import Correction, System


class Projection(NamedTuple):
    """A projected update, and what was found on the way.

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

    This is the smallest change of u, in the metric D⁻¹, after which J u' = −γ c:

        u' = u − D Jᵀλ,    (J D Jᵀ) λ = J u + γ c.

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
    key = jax.random.key(0) if key is None else key
    fix = "pass `model=` to `project`, the one that these parameters were taken from"
    constraints.check_current(parameters, batch, key, model, fix=fix)
    for member in constraints:
        check_overshoot(member, "update")
    point = Point(constraints, parameters, jnp.asarray(step, jnp.int32), batch, key, model)
    counts = tuple(traced.rows for traced in trace_members(point))
    layout = Layout(constraints, counts, dict.fromkeys(constraints.names, "update"))
    system = linearise(point, solver, layout.counts)
    found = correct_stage(update, point, layout, system, stage="update", metric=metric)
    return Projection(
        found.vector,
        layout.name(found.rows.values),
        {} if found.multipliers is None else layout.name(found.multipliers),
        report_corrections(layout, {"update": found}),
    )


@jax.named_scope("solve")
def correct_stage(
    vector: PyTree,
    point: Point,
    layout: Layout,
    system: System,
    *,
    stage: Stage,
    metric: PyTree | None = None,
    reach: Float[Array, ""] | None = None,
) -> Correction:
    """Corrects a gradient or an update, unless no constraint acts at this step."""
    rows = layout.ask(system.values, point.step, stage, reach=reach)
    acts = any_acts(point)
    if acts is None:
        found = system.correct(vector, rows, point.parameters, metric)
    else:
        found = jax.lax.cond(
            acts,
            lambda v: system.correct(v, rows, point.parameters, metric),
            lambda v: system.leave(v, rows),
            vector,
        )
        # `cond` traces all that it returns, and which rows these are must stay known.
        found = found._replace(rows=rows)
    return found._replace(vector=_spoil_if_not_allowed(found.vector, point))


def _spoil_if_not_allowed(vector: PyTree, point: Point) -> PyTree:
    """Makes a vector NaN where a schedule has returned a γ or a damping that is not allowed.

    Solvers and active sets would leave such rows out, silently.
    """
    step = point.step
    read = [(m, m.gamma_at(step)) for m in point.constraints if callable(m.gamma)]
    read += [(m, m.damping_at(step)) for m in point.constraints if callable(m.damping)]
    if not read:
        return vector
    wrong = [member.acts_at(step) & jnp.isnan(number) for member, number in read]
    is_wrong = jnp.any(jnp.stack(wrong))
    return jax.tree.map(lambda leaf: jnp.where(is_wrong, jnp.nan, leaf).astype(leaf.dtype), vector)


def report_corrections(layout: Layout, corrections: dict[Stage, Correction]) -> dict[str, Report]:
    """How each constraint fared, judged by the last stage that it took part in."""
    named = {stage: _name_parts(layout, found) for stage, found in corrections.items()}
    reports = {}
    for member in layout.constraints:
        stage = STAGES[layout.placements[member.name]][-1]
        found = corrections[stage]
        values, after, before, target, acts, slack, yielded = (
            part[member.name] for part in named[stage]
        )
        violation = jnp.sqrt(jnp.mean(jnp.square(measure_excess(member, values))))
        left = _measure_undone(member, after - target - yielded)
        active = jnp.any(acts)
        # Row by row, because the room or the units of some are no excuse for others: a tenth of
        # γ c, a tenth of the tolerance, and what an inexact solve leaves of J u + γ c.
        allowed = 0.1 * (jnp.abs(target) + member.tolerance) + slack
        allowed += INACCURATE * jnp.abs(_measure_undone(member, before - target))
        # A row that is not a number is not fulfilled.
        fulfilled = jnp.all(~acts | (jnp.abs(left) <= allowed))
        if member.is_bounded:
            # With the wrong rows active a step may obey, and be far from the nearest that does.
            fulfilled &= found.converged
        reports[member.name] = Report(
            violation=violation,
            met=violation <= member.tolerance,
            resolved=~active | fulfilled,
            active=active,
            iterations=found.iterations,
            converged=found.converged,
        )
    return reports


def _measure_undone(member: Member, change: Array) -> Array:
    """By how much rows change other than they should: not at all if they may fall further."""
    return jnp.maximum(change, 0) if member.is_bounded else change


def _name_parts(layout: Layout, found: Correction) -> list[dict[str, Array]]:
    rows = found.rows
    parts = [rows.values, found.after, found.before, rows.target, rows.acts]
    return [layout.name(part) for part in (*parts, found.slack, found.yielded)]
