"""`polish`: Gauss-Newton on the constraints alone, after training."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree

from constrainx.constraints import (
    Composed,
    Constraint,
    Member,
    as_count,
    as_number,
    compose,
    constraints_of,
    smooth_rows,
)
from constrainx.data import Batches
from constrainx.errors import ArgumentError
from constrainx.linalg import Solver
from constrainx.polishing._points import Points, find_reads
from constrainx.polishing._polished import Polished, PolishedConstraint, explain
from constrainx.polishing._prepare import (
    find_noise,
    find_rounding,
    find_scales,
    measure_move,
    pick_steps,
)
from constrainx.polishing._read import read_held_out, read_points
from constrainx.polishing._search import Ending, Limits, Searched, measure, search
from constrainx.polishing._system import Given, Measured, System

Model = TypeVar("Model", bound=nnx.Module)
Loss = Callable[..., Any]

# Apart from the keys of training and of `certify`.
_STREAM, _HELD_OUT = 0x706F_6C69, 0x6865_6C64


def polish(
    model: Model,
    constraints: Composed | Constraint | Sequence[Constraint] | None = None,
    data: Batches | PyTree = None,
    *,
    keep: Batches | PyTree = None,
    of: Callable[[Any, Any], PyTree] | None = None,
    weight: float = 10.0,
    tolerance: float | None = None,
    held_out: Batches | PyTree = None,
    loss: Loss | None = None,
    most_loss: float = math.inf,
    batch: int | None = None,
    batches: int | None = None,
    draws: int = 1,
    augment: Callable[[Any, Array], Any] | None = None,
    wrt: Any = None,
    max_steps: int = 50,
    solver: Solver | None = None,
    seed: int = 0,
) -> tuple[Model, Polished]:
    """Makes constraints hold at given points, by Gauss-Newton on the constraints alone.

    Each step solves J Δ = −c for all given points together, with the residuals themselves as rows
    where training used norms, so that convergence is quadratic. Of all solutions it takes the one
    that moves parameters, and outputs at ``keep``, the least:

        min ‖Δ‖² + w²‖K Δ‖²   under   J Δ = −c,

    where K is the Jacobian of these outputs, scaled so that its rows have length one on average.
    A step is shortened, and then damped, until ‖c‖ falls. Where the constraints cannot be met, the
    result says why. What holds at the given points need not hold elsewhere: pass ``held_out``.

    >>> import constrainx as cx, numpy as np
    >>> from flax import nnx
    >>> class Odd(cx.Constraint):
    ...     def residual(self, model, batch, *, key):
    ...         return model(-batch["x"]) + model(batch["x"])
    >>> network = cx.models.MLP((1, 16, 1), rngs=nnx.Rngs(0))
    >>> x = np.linspace(0, 1, 8, dtype=np.float32)[:, None]
    >>> network, polished = cx.polish(network, Odd(), {"x": x}, tolerance=0.0)
    >>> polished.met
    True

    Args:
        model: polished as a copy, in evaluation mode; it is left as it is.
        constraints: those to meet, in addition to the ones that are attached to the model; or all
            of them, as `compose` returns them.
        data: the points that they are to hold at: batches from `constrainx.data`, read from step 0,
            or a dictionary of arrays with examples along the first axis. May be left out for
            constraints on the parameters, or that draw points.
        keep: points, in the same form, at which outputs are to change little; the given points
            if it is the same object as ``data``.
        of: (model, batch) ↦ the outputs to keep; ``model(batch["x"])`` by default.
        weight: w, how much a change of these outputs counts beside one of the parameters;
            ``math.inf`` makes them rows, which must not change at all.
        tolerance: the violation at which it ends; each constraint's own if left out. With 0.0 it
            goes on until rounding stops it.
        held_out: points to measure at, in the same form, but not to use.
        loss: (model, batch) or (model, batch, key) ↦ a number, to be measured at the given points
            before and after, in evaluation mode.
        most_loss: what the loss must not exceed.
        batch: how many examples of a dictionary are looked at together: what limits memory.
        batches: how many batches of ``data`` to use; one pass if left out.
        draws: how many keys a constraint that draws has at each batch; the keys stay the same.
        augment: (batch, key) ↦ batch, applied once to each batch of ``data``.
        wrt: an NNX filter: which parameters may move, instead of what the constraints say, who must
            agree on it otherwise.
        max_steps: how many steps to take at most.
        solver: a solver for the least-squares problem of each step. By default rows that are few
            enough are stored, and solved in float64; for others it is `LSMR`.
        seed: for all keys.

    Returns:
        The model, and what was done to it. A constraint that knows its nearest point, such as
        `EquivariantKernels`, is met in closed form, unless another one moves the same parameters or
        outputs are to be kept.
    """
    max_steps = as_count(max_steps, argument="polish(max_steps=...)")
    draws = as_count(draws, argument="polish(draws=...)")
    if tolerance is not None:
        tolerance = as_number(tolerance, argument="polish(tolerance=...)", least=0)
    if weight != math.inf:
        weight = as_number(weight, argument="polish(weight=...)", least=0)
    if loss is None and most_loss != math.inf:
        raise ArgumentError("`polish(most_loss=...)` needs the loss that it limits: pass `loss=`.")
    composed = _compose(model, constraints)
    graph, parameters, rngs, rest = _split(model, composed, wrt)
    leaves, structure = jax.tree.flatten(parameters)
    key = jax.random.fold_in(jax.random.key(seed), _STREAM)
    points = read_points(
        data, argument="data", model=model, key=key, draws=draws, batch=batch, batches=batches,
        augment=augment,
    )  # fmt: skip
    held_points = None
    if held_out is not None:
        held_key = jax.random.fold_in(key, _HELD_OUT)
        options = {} if batch is None else {"batch": batch}
        held_points = read_held_out(held_out, model=model, key=held_key, draws=draws, **options)
    kept_points = None
    if keep is not None:
        kept_points = points
        if keep is not data:
            kept_points = read_points(
                keep, argument="keep", model=model, key=key, batch=batch, batches=batches
            )

    allowed = [_list_movable(member, parameters, wrt) for member in composed]
    known = _find_known(composed, allowed) if keep is None else ()
    moves = _agree(composed, allowed, known)
    reads = tuple(find_reads(member, parameters, points, model) for member in composed)
    whole = System(
        graph=graph,
        structure=structure,
        moves=moves,
        members=composed.members,
        reads=reads,
        of=_call if of is None else of,
        is_hard=weight == math.inf,
        loss=None if loss is None else _as_loss(loss),
    )
    rows = [index for index in range(len(reads)) if index not in known]
    system = whole
    if known:
        members = tuple(composed.members[index] for index in rows)
        system = dataclasses.replace(whole, members=members, reads=tuple(reads[i] for i in rows))

    def give(points: Points, leaves: Sequence[Array], system: System) -> Given:
        held = [leaf for leaf, moving in zip(leaves, moves, strict=True) if not moving]
        scales = (np.float32(1),) * (len(system.members) + 1)
        return Given(held, rest, rngs, points, None, None, scales)

    # Held-out points may lack what the loss looks at.
    without_loss = dataclasses.replace(whole, loss=None)

    def look(points: Points, leaves: Sequence[Array], system: System = whole) -> Measured:
        moved = [leaf for leaf, moving in zip(leaves, moves, strict=True) if moving]
        return measure(system, moved, None, 0.0, give(points, leaves, system))[1]

    held_before = None if held_points is None else look(held_points, leaves, without_loss)
    new, found = leaves, None
    before = None
    if known:
        before = look(points, leaves)
        new = _meet_known(composed, known, parameters, model)
    tolerances = [m.tolerance if tolerance is None else tolerance for m in composed]
    dead: list[str] = []
    is_exact = True
    if rows:
        moved = [leaf for leaf, moving in zip(new, moves, strict=True) if moving]
        given = give(points, new, system)._replace(kept_points=kept_points)
        if kept_points is not None:
            given = given._replace(kept=jax.jit(system.outputs)(moved, given))
        steps = pick_steps(system, moved, given, solver)
        is_exact = steps.is_exact
        lengths = steps.measure(moved, given)
        dead = [m.name for m, n in zip(system.members, lengths.rows, strict=True) if n == 0]
        given = given._replace(scales=find_scales(lengths, weight))
        limits = Limits(
            tolerances=tuple(tolerances[index] for index in rows),
            change=find_rounding(leaves) if system.is_hard and keep is not None else None,
            loss=most_loss,
            steps=max_steps,
        )
        noise = find_noise(system, moved, given, lengths)
        found = search(system, steps, moved, given, limits, noise=noise)
        new = jax.tree.leaves(system.parameters(found.moved, given.held))
    if found is not None and not known:
        before, after = found.first, found.last
    else:
        after = look(points, new)
    assert before is not None  # measured here, or by the search
    held_after = None if held_points is None else look(held_points, new, without_loss)
    ending = _end_of(found, after, tolerances)
    entries = _list_constraints(
        composed, before, after, held_before, held_after, tolerances, ending, known
    )
    change = None
    if found is not None and keep is not None:
        change = float(found.last.change) / max(float(found.last.outputs), 1e-30)
    polished = Polished(
        constraints=entries,
        ending=ending,
        reason=explain(
            ending,
            0 if found is None else len(found.strides),
            unmet=[entry.name for entry in entries if not entry.met],
            dead=dead,
            is_exact=is_exact,
            is_kept=system.is_hard and keep is not None,
        ),
        steps=() if found is None else found.strides,
        loss=None if loss is None else (float(before.loss), float(after.loss)),
        change=change,
        moved=measure_move(leaves, new),
    )
    tree = jax.tree.unflatten(structure, new)
    return nnx.merge(graph, tree, rngs, rest, copy=True), polished


def _compose(model: nnx.Module, constraints: Any) -> Composed:
    """The constraints with all of the given points in view, and residuals for rows."""
    if isinstance(constraints, Composed):
        composed = constraints
    else:
        given = [constraints] if isinstance(constraints, Constraint) else list(constraints or ())
        attached = [model] if constraints_of(model) else []
        composed = compose(*attached, *given, model=model)
    smooth = smooth_rows(composed)
    return Composed(tuple(dataclasses.replace(m, examples=None) for m in smooth))


def _split(model: nnx.Module, composed: Composed, wrt: Any) -> tuple[Any, PyTree, PyTree, PyTree]:
    filters = [nnx.Param] if wrt is None else [wrt]
    if wrt is None:
        filters += [m.attached.constraint.wrt for m in composed if m.attached is not None]
    parts: Any = nnx.split(model, nnx.Any(*filters), nnx.RngState, ...)
    graph, parameters, rngs, rest = parts
    return graph, nnx.as_pure(parameters), rngs, nnx.as_pure(rest)


def _list_movable(member: Member, parameters: PyTree, wrt: Any) -> tuple[bool, ...]:
    leaves = jax.tree.leaves(parameters)
    moves = (True,) * len(leaves)
    if wrt is None and member.movable is not None:
        moves = member.movable(parameters)
    return tuple(
        moving and bool(jnp.issubdtype(leaf.dtype, jnp.floating))
        for leaf, moving in zip(leaves, moves, strict=True)
    )


def _find_known(composed: Composed, allowed: Sequence[tuple[bool, ...]]) -> tuple[int, ...]:
    """The constraints that can be met in closed form, because no other moves their parameters."""
    return tuple(
        index
        for index, member in enumerate(composed)
        if member.nearest is not None
        and not any(
            mine and theirs
            for other, flags in enumerate(allowed)
            if other != index
            for mine, theirs in zip(allowed[index], flags, strict=True)
        )
    )


def _agree(
    composed: Composed, allowed: Sequence[tuple[bool, ...]], known: Sequence[int]
) -> tuple[bool, ...]:
    """Which parameters may move; constraints that have rows must agree."""
    flags = {moves for index, moves in enumerate(allowed) if index not in known}
    if len(flags) > 1:
        names = [m.name for index, m in enumerate(composed) if index not in known]
        raise ArgumentError(
            f"{', '.join(map(repr, names))} differ in `wrt`, and all rows are solved together: "
            "pass `polish(wrt=...)` for all of them, or polish one after the other."
        )
    moves = flags.pop() if flags else (True,) * len(allowed[0])
    if not any(moves):
        raise ArgumentError(
            "`polish(wrt=...)`, or the `wrt` of the constraints, leaves no parameter that may move."
        )
    return moves


def _meet_known(
    composed: Composed, known: Sequence[int], parameters: PyTree, model: nnx.Module
) -> list[Array]:
    for index in known:
        nearest = composed.members[index].nearest
        assert nearest is not None  # by `_find_known`
        parameters = nearest(parameters, model)
    return jax.tree.leaves(parameters)


def _end_of(found: Searched | None, after: Measured, tolerances: Sequence[float]) -> Ending:
    if found is not None:
        return found.ending
    pairs = zip(after.violations, tolerances, strict=True)
    is_met = all(violation <= tolerance for violation, tolerance in pairs)
    return Ending.MET if is_met else Ending.ROUNDING


def _list_constraints(
    composed: Composed,
    before: Measured,
    after: Measured,
    held_before: Measured | None,
    held_after: Measured | None,
    tolerances: Sequence[float],
    ending: Ending,
    known: Sequence[int],
) -> tuple[PolishedConstraint, ...]:
    entries = []
    for index, (member, tolerance) in enumerate(zip(composed, tolerances, strict=True)):
        is_zero = tolerance == 0 and ending is Ending.ROUNDING
        entries.append(
            PolishedConstraint(
                name=member.name,
                before=float(before.violations[index]),
                after=float(after.violations[index]),
                held_out_before=None if not held_before else float(held_before.violations[index]),
                held_out_after=None if not held_after else float(held_after.violations[index]),
                tolerance=tolerance,
                rows=0 if index in known else int(after.counts[index]),
                met=bool(after.violations[index] <= tolerance) or is_zero,
            )
        )
    return tuple(entries)


def _call(model: Any, batch: Any) -> Any:
    if not isinstance(batch, dict) or "x" not in batch:
        found = sorted(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
        raise ArgumentError(
            f'`polish(keep=...)` keeps `model(batch["x"])`, but a batch is or has {found}: pass '
            "`of=lambda model, batch: ...`."
        )
    return model(batch["x"])


def _as_loss(loss: Loss) -> Callable[[Any, Any, Array], Array]:
    takes_key = "key" in inspect.signature(loss).parameters

    def find(model: Any, batch: Any, key: Array) -> Array:
        found = loss(model, batch, key=key) if takes_key else loss(model, batch)
        return jnp.asarray(found[0] if isinstance(found, tuple) else found)

    return find
