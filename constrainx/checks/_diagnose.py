"""`diagnose`: what constraints ask for at a point, whether they can have it, and what it costs."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, PyTree

from constrainx.checks._advice import advise
from constrainx.checks._contradictions import find_contradictions
from constrainx.checks._cost import Cost, measure_cost
from constrainx.checks._diagnosis import Diagnosed, Diagnosis
from constrainx.checks._geometry import Geometry, Rank, count_entries, measure_eps
from constrainx.checks._probed_rows import ProbedRows
from constrainx.checks._stored_rows import StoredRows
from constrainx.constraints import (
    Composed,
    Constraint,
    Member,
    compose,
    constraints_of,
    reseed_streams,
)
from constrainx.data import check_integers
from constrainx.linalg import norm
from constrainx.step import (
    Method,
    MethodName,
    NullSpace,
    Point,
    Traced,
    as_method,
    describe_route,
    explain_route,
    project,
    trace_members,
)

# As in the step: a row that asks for a longer step than this, in units of the parameters and of the
# inverse of rounding, has a gradient that is nothing but rounding.
LONGEST_STEP = 1e-3
# The Jacobian is stored, in float64, up to this many entries and rows.
MOST_ENTRIES = 2**26
MOST_ROWS = 2048


def diagnose(
    model: nnx.Module,
    constraints: Composed | Constraint | Sequence[Constraint] | None = None,
    batch: Any = None,
    *,
    loss: Callable[..., Any] | None = None,
    key: Array | None = None,
    step: int = 0,
    method: Method | MethodName = "nullspace",
    wrt: Any = nnx.Param,
) -> Diagnosis:
    """Examines constraints at a point: the model as it is, and one batch.

    Finds the rows of each constraint, their rank and conditioning, rows without a gradient,
    constraints that contradict each other, the angle between the gradient of the loss and the span
    of the rows, and what a constraint costs next to the loss; and gives advice in words. With up to
    2,048 rows, and 2²⁶ entries in their Jacobian, all of it is computed in float64 from the rows;
    beyond that it is estimated.

    >>> import constrainx as cx, jax.numpy as jnp
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> one = cx.UnitNorm(of=lambda m: m.kernel[...], name="one")
    >>> two = cx.UnitNorm(of=lambda m: m.kernel[...] / 2, name="two")
    >>> found = cx.diagnose(model, [one, two])
    >>> print(found.rank, found.contradictions)
    1 (('one', 'two'),)

    Args:
        model: left as it is.
        constraints: in addition to those that are attached to the model; or all of them, as
            `compose` returns them.
        batch: as the constraints and the loss take it.
        loss: (model, batch) ↦ a number, or a number and metrics; it may take a ``key``.
        key: for constraints that draw samples, and for the loss.
        step: for schedules.
        method: which is to respect the constraints, see `constrain`.
        wrt: an NNX filter: which variables are trained.
    """
    check_integers(batch, of="the batch")
    key = jax.random.key(0) if key is None else key
    parts: Any = nnx.split(model, wrt, nnx.RngState, ...)
    graph, parameters, rngs, rest = parts
    seen = nnx.clone(model)
    seen.eval()
    if isinstance(constraints, Composed):
        composed = constraints
    else:
        given = [constraints] if isinstance(constraints, Constraint) else list(constraints or ())
        composed = compose(*([seen] if constraints_of(seen) else []), *given, model=seen)

    def loss_of(parameters: PyTree) -> Float[Array, ""]:
        assert loss is not None
        merged = nnx.merge(graph, parameters, reseed_streams(rngs, key), rest, copy=True)
        merged.train()
        extra = {"key": key} if "key" in inspect.signature(loss).parameters else {}
        result = loss(merged, batch, **extra)
        return result[0] if isinstance(result, tuple) else result

    point = Point(composed, nnx.as_pure(parameters), jnp.asarray(step, jnp.int32), batch, key, seen)
    return diagnose_point(point, loss=None if loss is None else loss_of, method=as_method(method))


def diagnose_point(
    point: Point, *, loss: Callable[[PyTree], Array] | None, method: Method
) -> Diagnosis:
    """Examines the constraints of a point.

    Args:
        point: where.
        loss: a function of the parameters, or None.
        method: which is to respect the constraints.
    """
    members, traced = tuple(point.constraints), trace_members(point)
    counts = tuple(found.rows for found in traced)
    owners = np.repeat(np.arange(len(members)), counts)
    inequality = np.repeat([member.kind == "inequality" for member in members], counts)
    gradient = None if loss is None else jax.jit(jax.grad(loss))(point.parameters)
    entries = len(inequality) * count_entries(point.parameters)
    is_small = len(inequality) <= MOST_ROWS and entries <= MOST_ENTRIES
    geometry = (StoredRows if is_small else ProbedRows).at(point, inequality, gradient)
    excess = np.where(inequality, np.maximum(geometry.values, 0), np.abs(geometry.values))
    alive = ~_find_dead(geometry, excess, point)
    loss_cost = None if loss is None else measure_cost(jax.value_and_grad(loss), point.parameters)
    found = tuple(
        _examine(member, one, index, point, geometry, excess, alive, owners, method)
        for index, (member, one) in enumerate(zip(members, traced, strict=True))
    )
    everything = np.flatnonzero(alive)
    rank = _measure_rank(geometry, everything)
    if isinstance(method, NullSpace):
        route, reason = explain_route(method.solver, point, counts)
        solver = describe_route(route, counts)
    else:
        solver, reason = "none", f"the method is {type(method).__name__}"
    diagnosis = Diagnosis(
        constraints=found,
        parameters=count_entries(point.parameters),
        rank=rank.value,
        rank_is_exact=rank.is_exact,
        condition=geometry.measure_condition(everything) if len(everything) else math.nan,
        angle=_measure_angle(geometry, everything, has_loss=loss is not None),
        loss=loss_cost,
        solver=solver,
        reason=reason,
        contradictions=tuple(find_contradictions(members, geometry, excess, alive, owners)),
        how=geometry.how,
    )
    return dataclasses.replace(diagnosis, advice=advise(diagnosis))


def _examine(
    member: Member,
    traced: Traced,
    index: int,
    point: Point,
    geometry: Geometry,
    excess: Float[np.ndarray, " rows"],
    alive: Bool[np.ndarray, " rows"],
    owners: np.ndarray,
    method: Method,
) -> Diagnosed:
    own = owners == index
    rows = np.flatnonzero(own & alive)
    rank = _measure_rank(geometry, rows)
    is_finite = np.isfinite(geometry.lengths) & np.isfinite(excess)
    placement, reason = _place(member, traced, method)
    return Diagnosed(
        name=member.name,
        rows=traced.rows,
        rank=rank.value,
        rank_is_exact=rank.is_exact,
        directions=_count_directions(geometry, rows, own, float(member.damping_at(point.step))),
        condition=geometry.measure_condition(rows) if len(rows) else math.nan,
        dead=int(np.sum(own & ~alive)),
        stuck=int(np.sum(own & ~alive & is_finite & (excess > member.tolerance))),
        nonfinite=int(np.sum(own & ~is_finite)),
        violation=float(np.sqrt(np.mean(excess[own] ** 2))),
        angle=_measure_angle(geometry, rows, has_loss=bool(np.isfinite(_share(geometry, rows)))),
        placement=placement,
        reason=reason,
        cost=_measure_cost(member, point, method),
        tolerance=member.tolerance,
    )


def _measure_rank(geometry: Geometry, rows: np.ndarray) -> Rank:
    return geometry.measure_rank(rows) if len(rows) else Rank(0, is_exact=True)


def _count_directions(
    geometry: Geometry, rows: np.ndarray, own: Bool[np.ndarray, " all"], damping: float
) -> float:
    """How many directions the rows hold with μ, which is relative to all of the constraint's."""
    mean = float(np.mean(np.square(geometry.lengths[own])))
    return geometry.count_directions(rows, damping * mean) if len(rows) else 0.0


def _share(geometry: Geometry, rows: np.ndarray) -> float:
    return geometry.measure_share(rows) if len(rows) else 0.0


def _measure_angle(geometry: Geometry, rows: np.ndarray, *, has_loss: bool) -> float:
    if not has_loss:
        return math.nan
    return math.degrees(math.acos(min(_share(geometry, rows), 1.0)))


def _find_dead(
    geometry: Geometry, excess: Float[np.ndarray, " rows"], point: Point
) -> Bool[np.ndarray, " rows"]:
    """Rows without a gradient, or with one that is rounding: as in the step, see `NullSpace`."""
    longest = LONGEST_STEP / measure_eps(point.parameters) * (1 + float(norm(point.parameters)))
    is_finite = np.isfinite(geometry.lengths) & np.isfinite(excess)
    return (geometry.lengths == 0) | (excess > longest * geometry.lengths) | ~is_finite


def _place(member: Member, traced: Traced, method: Method) -> tuple[str, str]:
    if not isinstance(method, NullSpace):
        return "none", f"the method is {type(method).__name__}"
    placement = method.place(member, traced)
    if method.metric == "optimizer":
        return placement, "updates are projected in the optimizer's metric"
    if method.placement is not None:
        return placement, "the method says so"
    if member.placement is not None:
        return placement, "the constraint says so"
    if traced.is_fresh:
        return placement, "its rows depend on the batch or the key, and change from step to step"
    return placement, "its rows depend only on the parameters"


def _measure_cost(member: Member, point: Point, method: Method) -> Cost:
    """The cost of projecting on the rows of one constraint, or of the gradient of their squares."""
    alone = Composed((dataclasses.replace(member, gamma=1.0, start=0, stop=None, every=1),))
    own = point._replace(constraints=alone)

    def correct(parameters: PyTree) -> PyTree:
        if isinstance(method, NullSpace):
            return project(
                parameters,
                alone,
                parameters,
                batch=point.batch,
                key=point.key,
                model=point.model,
                solver=method.solver,
            ).update
        return jax.grad(lambda p: jnp.mean(own.rows(p)[member.name] ** 2))(parameters)

    return measure_cost(correct, point.parameters)
