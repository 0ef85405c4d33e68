"""How the constraints of a step are linearised: by which route, and where each is projected."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from constrainx.constraints import Member, Placement, cut_batch, find_live_inputs
from constrainx.errors import ArgumentError, ArgumentTypeError, did_you_mean
from constrainx.linalg import Solver
from constrainx.step._gram_system import GramSystem
from constrainx.step._iterative_system import INEXACT, IterativeSystem
from constrainx.step._jacobian import (
    RowJacobian,
    StackedJacobian,
    count_bytes,
    rows_of,
    rows_of_slices,
)
from constrainx.step._method import Point
from constrainx.step._separable import Apart, cut_apart, find_apart
from constrainx.step._system import System

log = logging.getLogger("constrainx")

SolverChoice: TypeAlias = Literal["auto", "gram"] | Solver
Route: TypeAlias = Literal["gram", "iterative"]

# Up to this many rows, a backward pass for each, all in one batch, is faster than the iterations of
# LSMR, as measured by `python -m benchmarks crossover`.
ROWS_WITH_STORED_GRADIENTS = 8
# With inequalities, iterations must search for the active rows first, which costs more.
ROWS_WITH_INEQUALITIES = 256
# Up to this many rows, a Gram matrix of rows on single examples is faster than these iterations.
ROWS_OF_SINGLE_EXAMPLES = 2048
# Rows of one constraint are scaled one by one if their lengths, as four probes see them, differ by
# more than this: as a standard deviation of their logarithms, which is 0.4 for rows of one length,
# or as a factor between one row and the mean.
SPREAD = 0.6
FAR = 8.0
# Their lengths are then measured by this many random words, of four probes each.
WORDS = 4
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

    apart = _take_apart(solver, point, counts)
    route = pick_route(solver, point, counts, apart)
    if route == "iterative":
        return _iterative(point, function, counts, None if isinstance(solver, str) else solver)
    jacobian = StackedJacobian(
        tuple(
            _differentiate_if_it_acts(point, *argument, found)
            for argument, found in zip(_arguments(point), apart, strict=True)
        )
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


def pick_route(
    solver: SolverChoice, point: Point, counts: tuple[int, ...], apart: Sequence[Apart | None]
) -> Route:
    """Closed form for one row, Gram matrix for few rows or rows on disjoint examples, else LSMR."""
    route, reason = explain_route(solver, point, counts, apart)
    if isinstance(solver, str):
        log.info(
            "%d rows from %s: %s, because %s",
            sum(counts), ", ".join(point.constraints.names), describe_route(route, counts), reason,
        )  # fmt: skip
    return route


def explain_route(
    solver: SolverChoice,
    point: Point,
    counts: tuple[int, ...],
    apart: Sequence[Apart | None] | None = None,
) -> tuple[Route, str]:
    """The route that a solver stands for at a point, and why, as the end of a sentence."""
    if not isinstance(solver, str):
        return "iterative", f"the solver {solver} was given"
    check_solver(solver)
    if solver == "gram":
        return "gram", 'solver="gram" was given'
    apart = _take_apart(solver, point, counts) if apart is None else apart
    shared = sum(n for n, found in zip(counts, apart, strict=True) if found is None)
    exact = any(member.is_bounded for member in point.constraints)
    most = ROWS_WITH_INEQUALITIES if exact else ROWS_WITH_STORED_GRADIENTS
    limit = f"the {most} up to which it is worth a Gram matrix"
    if shared > most:
        return "iterative", f"{shared} rows share their examples, more than {limit}"
    stored = sum(
        _measure_stored(point.parameters, *argument, found)
        for argument, found in zip(_arguments(point), apart, strict=True)
    )
    if stored > BYTES_OF_STORED_GRADIENTS:
        return "iterative", f"what their gradients are made of would take {stored / 1e9:.1f} GB"
    if sum(counts) == 1:
        return "gram", "there is one row"
    if not shared:
        return "gram", "every row has examples of its own"
    return "gram", f"{shared} rows share their examples, no more than {limit}"


def _take_apart(
    solver: SolverChoice, point: Point, counts: tuple[int, ...]
) -> tuple[Apart | None, ...]:
    """How the rows of each constraint are taken apart by examples, where that can be done."""
    exact = any(member.is_bounded for member in point.constraints)
    most = ROWS_WITH_INEQUALITIES if exact else ROWS_OF_SINGLE_EXAMPLES
    worth = range(ROWS_WITH_STORED_GRADIENTS + 1, most + 1) if isinstance(solver, str) else range(0)
    keys = point.constraints.keys(point.key)
    return tuple(
        find_apart(member, point, key, count=count)
        if member.slices is not None or count in worth
        else None
        for member, key, count in zip(point.constraints, keys, counts, strict=True)
    )


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
    point: Point, member: Member, batch: Any, key: Array, model: Any, apart: Apart | None
) -> RowJacobian:
    """The Jacobian of one constraint, or one of zeros, with its values if they are needed."""

    def differentiate() -> RowJacobian:
        return _differentiate(point.parameters, member, batch, key, model, apart)

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
    parameters: PyTree, member: Member, batch: Any, key: Array, model: Any, apart: Apart | None
) -> RowJacobian:
    batch = member.view(batch, key, model)
    movable = None if member.movable is None else member.movable(parameters)
    if apart is None:
        return rows_of(lambda p: member.function(p, batch, key, model), parameters, movable=movable)
    arrays, restore = cut_apart(batch, apart)

    def rows(p: PyTree, piece: tuple[list[Any], Array]) -> Float[Array, " rows_of_piece"]:
        cut, own_key = piece
        return member.function(p, restore(cut), own_key, model)

    pieces = cut_batch(arrays, key, apart.pieces)
    return rows_of_slices(rows, parameters, pieces, movable=movable, outputs=apart.outputs)


def _measure_stored(
    parameters: PyTree, member: Member, batch: Any, key: Array, model: Any, apart: Apart | None
) -> int:
    """The bytes of what the Gram matrix is made of, and its own, without computing any."""
    sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(parameters)]
    rows = 1 if apart is None else apart.pieces * sum(apart.outputs)
    if apart is not None and sum(sizes) * rows < 2**28:
        return 0  # not worth tracing
    shapes = jax.eval_shape(lambda: _differentiate(parameters, member, batch, key, model, apart))
    # Two products of tokens, and two copies in the solver.
    return count_bytes(shapes) + 4 * rows**2 * shapes.values.dtype.itemsize


def _iterative(
    point: Point, function: Any, counts: tuple[int, ...], solver: Solver | None
) -> IterativeSystem:
    values, linear = jax.linearize(function, point.parameters)
    movable = _common_movable(point)
    scales = jnp.ones_like(values)
    if values.size > 1:
        acts = any_acts(point)

        def measure() -> Array:
            return _measure_scales(linear, movable, point, counts, values.dtype)

        scales = measure() if acts is None else jax.lax.cond(acts, measure, lambda: scales)
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


def _measure_scales(
    linear: Any, movable: tuple[bool, ...] | None, point: Point, counts: tuple[int, ...], dtype: Any
) -> Float[Array, " rows"]:
    """What each row is divided by: its length, or that of its constraint's rows if they are alike.

    A few probes tell a length to a factor of two or so. Where rows are alike, as they mostly are,
    their mean is better than that. Where they are not, more probes are worth their time.
    """
    key = jax.random.fold_in(point.key, 3)

    class Measured(NamedTuple):
        total: Float[Array, " rows"]
        words: Int[Array, ""]
        alike: Bool[Array, " constraints"]

    def go_on(measured: Measured) -> Bool[Array, ""]:
        return (measured.words == 0) | ((measured.words < WORDS) & ~jnp.all(measured.alike))

    def measure(measured: Measured) -> Measured:
        drawn = jax.random.fold_in(key, measured.words)
        total = measured.total + _probe_lengths(linear, movable, point.parameters, drawn)
        first = jnp.stack([_are_alike(own) for own in _split(jnp.sqrt(total), counts)])
        alike = jnp.where(measured.words == 0, first, measured.alike)
        return Measured(total, measured.words + 1, alike)

    start = Measured(
        jnp.zeros(sum(counts), dtype), jnp.zeros((), jnp.int32), jnp.ones(len(counts), bool)
    )
    total, words, alike = jax.lax.stop_gradient(jax.lax.while_loop(go_on, measure, start))
    squares = total / words
    scales = []
    for index, own in enumerate(_split(squares, counts)):
        typical = jnp.mean(own)
        scale = jnp.where(alike[index] | ~(own > 0), typical, own)
        scales.append(jnp.sqrt(jnp.where(typical > 0, scale, 1)))
    return jnp.concatenate(scales)


def _probe_lengths(
    linear: Any, movable: tuple[bool, ...] | None, parameters: PyTree, key: Array
) -> Float[Array, " rows"]:
    """The squared length of each row, estimated: ‖J_i‖² is the mean of (J_i z)².

    The bytes of one random word for each parameter are four z: drawing numbers by the million is
    slow, and these need not be good. Unlike signs, they seldom cancel.
    """
    leaves, tree = jax.tree.flatten(parameters)
    keys = jax.random.split(key, len(leaves))
    words = [jax.random.bits(k, p.shape, "uint32") for k, p in zip(keys, leaves, strict=True)]
    moves = (True,) * len(leaves) if movable is None else movable

    def probe(shift: Array) -> Float[Array, " rows"]:
        draws = [
            # Between ±√3, where the variance is one.
            ((((w >> shift) & 255).astype(p.dtype) - 127.5) / 73.9) * moving
            for w, p, moving in zip(words, leaves, moves, strict=True)
        ]
        return jnp.square(linear(jax.tree.unflatten(tree, draws)))

    return jnp.mean(jax.lax.map(probe, jnp.arange(0, 32, 8, dtype=jnp.uint32)), axis=0)


def _are_alike(lengths: Float[Array, " rows"]) -> Bool[Array, ""]:
    """Whether rows may be of one length, as far as four probes can tell."""
    counts = lengths > 0
    total = jnp.maximum(jnp.sum(counts), 1)
    logarithms = jnp.log(jnp.where(counts, lengths, 1))
    away = jnp.where(counts, logarithms - jnp.sum(logarithms) / total, 0)
    spread = jnp.sqrt(jnp.sum(jnp.square(away)) / total)
    return ~((spread > SPREAD) | (jnp.max(jnp.abs(away)) > math.log(FAR)))


def _split(rows: Array, counts: tuple[int, ...]) -> list[Array]:
    """Rows by constraint."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [rows[end - count : end] for end, count in zip(ends, counts, strict=True)]
