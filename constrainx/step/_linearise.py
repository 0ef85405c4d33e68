"""How the constraints of a step are linearised: by which route, and where each is projected."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from constrainx.constraints import Member, Placement, cut_batch, find_live_inputs
from constrainx.errors import ArgumentError, ArgumentTypeError, did_you_mean
from constrainx.linalg import Solver
from constrainx.step._jacobian import (
    RowJacobian,
    StackedJacobian,
    count_stored_bytes,
    rows_of,
    rows_of_slices,
)
from constrainx.step._method import Point
from constrainx.step._separable import separate_examples
from constrainx.step._system import INEXACT, GramSystem, IterativeSystem, System

log = logging.getLogger("constrainx")

SolverChoice: TypeAlias = Literal["auto", "gram"] | Solver
Route: TypeAlias = Literal["gram", "iterative"]

# Up to this many rows, a backward pass for each, all in one batch, is faster than the iterations of
# LSMR, as measured by `python -m benchmarks crossover`.
ROWS_WITH_STORED_GRADIENTS = 8
# With inequalities, iterations must search for the active rows first, which costs more.
ROWS_WITH_INEQUALITIES = 256
# Up to this many rows, a Gram matrix of rows on single examples is faster than these iterations.
ROWS_OF_SINGLE_EXAMPLES = 512
# Rows shorter than this part of the others in their constraint are scaled one by one.
FAR = 0.1
# The gradients of all rows should fit beside the model.
BYTES_OF_STORED_GRADIENTS = 2**31


class Traced(NamedTuple):
    """What tracing a constraint tells.

    Attributes:
        rows: how many rows it has.
        is_fresh: whether they depend on the batch or the key, and so change from step to step.
    """

    rows: int
    is_fresh: bool


def trace_members(point: Point) -> tuple[Traced, ...]:
    """How many rows each constraint has, and whether they are drawn anew in each step."""
    for leaf in jax.tree.leaves(point.parameters):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ArgumentTypeError(
                "the null-space step needs real parameters, got one of "
                f"{leaf.dtype}{list(leaf.shape)}: keep its real and imaginary parts as two."
            )
    found = []
    for member, batch, key, model in _arguments(point):
        closed = jax.make_jaxpr(lambda p, b, k, m=member, n=model: m.rows(p, b, k, n))(
            point.parameters, batch, key
        )
        live = find_live_inputs(closed)
        (rows,) = closed.out_avals
        parameters = len(jax.tree.leaves(point.parameters))
        found.append(Traced(rows.shape[0], any(live[parameters:])))
    return tuple(found)


def place_rows(member: Member, traced: Traced) -> Placement:
    """Where a constraint is projected by default.

    Rows that depend on the parameters alone, or on points that stay the same, can be met exactly,
    and are projected twice. Rows that are drawn anew in each step can be met only at the points of
    that step. Held exactly, they can stop a network from learning, so they are projected in the
    gradient.
    """
    return member.placement or ("gradient" if traced.is_fresh else "twice")


@jax.named_scope("linearise")
def linearise(point: Point, solver: SolverChoice, counts: tuple[int, ...]) -> System:
    """The rows of all constraints at a point, once for all stages of a step.

    Only constraints that act at this step are differentiated. Others cost a forward pass if they
    are to be measured, and nothing if not.

    Args:
        point: where.
        solver: "auto", "gram", or a least-squares solver.
        counts: how many rows each constraint has.
    """
    keys = point.constraints.keys(point.key)

    def function(p: PyTree) -> Float[Array, " rows"]:
        pairs = zip(point.constraints, keys, strict=True)
        return jnp.concatenate([point.evaluate(member, p, key) for member, key in pairs])

    separated = _separate(solver, point, counts)
    route = pick_route(solver, separated, counts)
    if route == "iterative":
        return _iterative(point, function, counts, None if isinstance(solver, str) else solver)
    point = separated
    jacobian = StackedJacobian(
        tuple(_differentiate_if_it_acts(point, *argument) for argument in _arguments(point))
    )
    acts = any_acts(point)
    if acts is None:
        return GramSystem(jacobian, jacobian.gram())
    blank = _blank(jax.eval_shape(jacobian.gram))
    return GramSystem(jacobian, jax.lax.cond(acts, jacobian.gram, lambda: blank))


def any_acts(point: Point) -> Bool[Array, ""] | None:
    """Whether any constraint acts at this step, or None if one always does."""
    if any(member.acts_always for member in point.constraints):
        return None
    return jnp.any(jnp.stack([member.acts_at(point.step) for member in point.constraints]))


def pick_route(solver: SolverChoice, point: Point, counts: tuple[int, ...]) -> Route:
    """Closed form for one row, Gram matrix for few rows or rows on disjoint examples, else LSMR."""
    route, reason = explain_route(solver, point, counts)
    if isinstance(solver, str):
        log.info(
            "%d rows from %s: %s, because %s",
            sum(counts), ", ".join(point.constraints.names), describe_route(route, counts), reason,
        )  # fmt: skip
    return route


def explain_route(solver: SolverChoice, point: Point, counts: tuple[int, ...]) -> tuple[Route, str]:
    """The route that a solver stands for at a point, and why, as the end of a sentence."""
    if not isinstance(solver, str):
        return "iterative", f"the solver {solver} was given"
    check_solver(solver)
    if solver == "gram":
        return "gram", 'solver="gram" was given'
    point = _separate(solver, point, counts)
    shared = sum(n for m, n in zip(point.constraints, counts, strict=True) if m.slices is None)
    exact = any(member.kind == "inequality" for member in point.constraints)
    most = ROWS_WITH_INEQUALITIES if exact else ROWS_WITH_STORED_GRADIENTS
    limit = f"the {most} up to which it is worth a Gram matrix"
    if shared > most:
        return "iterative", f"{shared} rows share their examples, more than {limit}"
    stored = sum(_measure_stored(point.parameters, *argument) for argument in _arguments(point))
    if stored > BYTES_OF_STORED_GRADIENTS:
        size = f"{stored / 1e9:.1f} GB"
        return "iterative", f"their gradients, row by row, would take {size}"
    if sum(counts) == 1:
        return "gram", "there is one row"
    if not shared:
        return "gram", "every row has examples of its own"
    return "gram", f"{shared} rows share their examples, no more than {limit}"


def _separate(solver: SolverChoice, point: Point, counts: tuple[int, ...]) -> Point:
    """The point with a slice of the batch for each row of constraints that allow it."""
    if not isinstance(solver, str):
        return point
    exact = any(member.kind == "inequality" for member in point.constraints)
    most = ROWS_WITH_INEQUALITIES if exact else ROWS_OF_SINGLE_EXAMPLES
    return separate_examples(point, counts, rows=range(ROWS_WITH_STORED_GRADIENTS + 1, most + 1))


def describe_route(route: Route, counts: tuple[int, ...]) -> str:
    """The route in words."""
    if route == "iterative":
        return f"iterations of {INEXACT}"
    return "closed form" if sum(counts) == 1 else "Gram matrix"


def check_solver(solver: Any) -> None:
    """Raises unless it is one of the two names, or an object with a method `solve`."""
    if solver not in ("auto", "gram") and not isinstance(solver, Solver):
        raise ArgumentError(
            '`solver` must be "auto", "gram" or a least-squares solver such as `cx.LSMR()`, got '
            f"{solver!r}.{did_you_mean(solver, ('auto', 'gram'))}"
        )


def _arguments(point: Point) -> list[tuple[Member, Any, Array, Any]]:
    keys = point.constraints.keys(point.key)
    return [(m, point.batch, k, point.model) for m, k in zip(point.constraints, keys, strict=True)]


def _differentiate_if_it_acts(
    point: Point, member: Member, batch: Any, key: Array, model: Any
) -> RowJacobian:
    """The Jacobian of one constraint, or one of zeros, with its values if they are needed."""

    def differentiate() -> RowJacobian:
        return _differentiate(point.parameters, member, batch, key, model)

    if member.acts_always:
        return differentiate()

    def evaluate_alone() -> RowJacobian:
        blank = _blank(jax.eval_shape(differentiate))
        values = point.evaluate(member, point.parameters, key)
        return dataclasses.replace(blank, values=values)

    return jax.lax.cond(member.acts_at(point.step), differentiate, evaluate_alone)


def _blank(shapes: PyTree) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _differentiate(
    parameters: PyTree, member: Member, batch: Any, key: Array, model: Any
) -> RowJacobian:
    batch = member.view(batch)
    movable = None if member.movable is None else member.movable(parameters)
    if member.slices is None:
        return rows_of(lambda p: member.function(p, batch, key, model), parameters, movable=movable)
    pieces = cut_batch(batch, key, member.slices(batch))
    return rows_of_slices(
        lambda p, piece: member.function(p, piece[0], piece[1], model)[0],
        parameters,
        pieces,
        movable=movable,
    )


def _measure_stored(parameters: PyTree, member: Member, batch: Any, key: Array, model: Any) -> int:
    """The bytes of gradients that the Gram matrix would need stored, without computing any."""
    sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(parameters)]
    if member.slices is not None and sum(sizes) * member.slices(member.view(batch)) < 2**28:
        return 0  # not worth tracing
    shapes = jax.eval_shape(lambda: _differentiate(parameters, member, batch, key, model))
    return count_stored_bytes(shapes)


def _iterative(
    point: Point, function: Any, counts: tuple[int, ...], solver: Solver | None
) -> IterativeSystem:
    values, linear = jax.linearize(function, point.parameters)
    movable = _common_movable(point)
    scales = jnp.ones_like(values)
    if values.size > 1:
        acts = any_acts(point)
        lengths = (
            _measure_lengths(linear, movable, point)
            if acts is None
            else jax.lax.cond(
                acts, lambda: _measure_lengths(linear, movable, point), lambda: scales
            )
        )
        scales = _choose_scales(lengths, counts)
    return IterativeSystem(values, linear, movable, counts, scales, point.parameters, solver)


def _common_movable(point: Point) -> tuple[bool, ...] | None:
    """Which parameters the rows may move, if they agree."""
    leaves = jax.tree.leaves(point.parameters)
    flags = {
        (True,) * len(leaves) if member.movable is None else member.movable(point.parameters)
        for member in point.constraints
    }
    if len(flags) > 1:
        raise ArgumentError(
            "constraints that differ in `wrt` are solved together by the Gram matrix alone: use "
            '`solver="gram"`, or the same `wrt` for '
            f"{', '.join(map(repr, point.constraints.names))}."
        )
    (found,) = flags
    return None if all(found) else found


def _measure_lengths(
    linear: Any, movable: tuple[bool, ...] | None, point: Point
) -> Float[Array, " rows"]:
    """The length of each row to a factor of two or so: ‖J_i‖² is the mean of (J_i z)².

    The bytes of one random word for each parameter are four z: drawing numbers by the million is
    slow, and these need not be good. Unlike signs, they seldom cancel.
    """
    leaves, tree = jax.tree.flatten(point.parameters)
    keys = jax.random.split(jax.random.fold_in(point.key, 3), len(leaves))
    words = [jax.random.bits(k, p.shape, "uint32") for k, p in zip(keys, leaves, strict=True)]
    moves = (True,) * len(leaves) if movable is None else movable

    def probe(shift: Array) -> Float[Array, " rows"]:
        draws = [
            # Between ±√3, where the variance is one.
            ((((w >> shift) & 255).astype(p.dtype) - 127.5) / 73.9) * moving
            for w, p, moving in zip(words, leaves, moves, strict=True)
        ]
        return jnp.square(linear(jax.tree.unflatten(tree, draws)))

    squares = jax.lax.map(probe, jnp.arange(0, 32, 8, dtype=jnp.uint32))
    return jax.lax.stop_gradient(jnp.sqrt(jnp.mean(squares, axis=0)))


def _choose_scales(lengths: Float[Array, " rows"], counts: tuple[int, ...]) -> Array:
    """The typical length of each constraint's rows, or a row's own if that is far from typical.

    Where all are alike, as they mostly are, the noise of the lengths would only slow a solver down.
    """
    scales, start = [], 0
    for count in counts:
        own = lengths[start : start + count]
        typical = jnp.sqrt(jnp.mean(jnp.square(own)))
        scale = jnp.where((own > 0) & (own < FAR * typical), own, typical)
        scales.append(jnp.where(typical > 0, scale, 1))
        start += count
    return jnp.concatenate(scales)
