"""Gauss-Newton steps, a line search along each, and when to end."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from constrainx.polishing._steps import Steps
from constrainx.polishing._system import Given, Measured, System

# A step must lower ‖c‖² by this fraction of what it promises, in the words of Armijo.
ENOUGH = 2e-4
# Step lengths that are tried: 1, ½, …
HALVINGS = 7
# The damping after a step that was no use, relative to the mean squared length of a row; how it
# grows and falls; and the damping after which there is no use in more, or in any.
FIRST, FACTOR, MOST, LEAST = 1e-3, 10.0, 1e4, 1e-4
# Rows contradict each other if a step without damping promises to remove less than this; or less
# than the second, and rounding or the curvature hides even that.
NOTHING, LITTLE = 1e-6, 1e-2
# Rows are zero to rounding below this many times what the last digit of the parameters changes, and
# as good as zero below the second, once nothing lowers them further.
ROUNDING, NEAR = 4.0, 50.0
# So many steps must lower ‖c‖ to less than this fraction.
STALLED, SLOW = 6, 0.9


class Ending(enum.StrEnum):
    """Why polishing ended."""

    MET = "met"
    ROUNDING = "rounding"
    CONTRADICTION = "contradiction"
    LOSS = "loss"
    NO_DESCENT = "no descent"
    STALLED = "stalled"
    STEPS = "steps"
    NOT_FINITE = "not finite"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stride:
    """One step that was taken.

    Attributes:
        size: the norm of what is left of the scaled rows, relative to the start.
        length: of the step; one is a full Gauss-Newton step.
        damping: of the step, in units of a row's length.
        loss: at the given points after it; None if there is none.
        iterations: of the least-squares solver.
        converged: whether the solver did.
    """

    size: float
    length: float
    damping: float
    loss: float | None
    iterations: int
    converged: bool


class Searched(NamedTuple):
    """Where a search ended, and why.

    Attributes:
        moved: the parameters.
        ending: why.
        strides: the steps on the way.
        first: what was known at the start.
        last: what is known at the end.
    """

    moved: list[Array]
    ending: Ending
    strides: tuple[Stride, ...]
    first: Measured
    last: Measured


class Limits(NamedTuple):
    """What a search is to reach, and what it must not exceed.

    Attributes:
        tolerances: the violation of each constraint at which it ends; zero for rounding.
        change: the relative change of outputs that must not change at all; None if they may.
        loss: what the loss must not exceed.
        steps: how many may be taken.
    """

    tolerances: tuple[float, ...]
    change: float | None
    loss: float
    steps: int


def search(
    system: System,
    steps: Steps,
    moved: list[Array],
    given: Given,
    limits: Limits,
    *,
    noise: float,
) -> Searched:
    """Takes steps until the constraints hold, or until there is a reason to stop.

    Args:
        system: the equations.
        steps: how they are solved.
        moved: the parameters to start from.
        given: what else there is.
        limits: what is to be reached.
        noise: the norm of the scaled rows below which they are rounding.
    """
    moved, now = measure(system, moved, None, 0.0, given)
    first = now
    start, damping = max(float(now.size), math.ulp(0.0)), 0.0
    strides: list[Stride] = []

    def end(ending: Ending) -> Searched:
        return Searched(moved, ending, tuple(strides), first, now)

    if not math.isfinite(now.size):
        return end(Ending.NOT_FINITE)
    sizes = [float(now.size)]
    while True:
        if _is_met(now, limits):
            return end(Ending.MET)
        if now.size <= ROUNDING * noise:
            return end(Ending.ROUNDING)
        if len(strides) >= limits.steps:
            return end(Ending.STEPS)
        step = steps.take(moved, given, damping)
        descent = float(step.descent)
        if damping == 0 and descent < NOTHING:
            return end(Ending.ROUNDING if now.size <= NEAR * noise else Ending.CONTRADICTION)
        found = _find_length(system, moved, step.change, given, now, descent, limits)
        if found.length == 0:
            if now.size <= NEAR * noise:
                return end(Ending.ROUNDING)
            if damping == 0 and descent < LITTLE and not found.is_loss:
                return end(Ending.CONTRADICTION)
            damping = max(FACTOR * damping, FIRST)
            if damping > MOST:
                return end(Ending.LOSS if found.is_loss else Ending.NO_DESCENT)
            continue
        moved, now = found.moved, found.measured
        sizes.append(float(now.size))
        strides.append(
            Stride(
                size=float(now.size) / start,
                length=found.length,
                damping=damping,
                loss=None if system.loss is None else float(now.loss),
                iterations=int(step.iterations),
                converged=bool(step.converged),
            )
        )
        if found.length == 1:
            damping = damping / FACTOR if damping > LEAST else 0.0
        elif found.length < 0.25:
            damping = max(FACTOR * damping, FIRST)
        if len(sizes) > STALLED and sizes[-1] > SLOW * sizes[-1 - STALLED]:
            if now.size <= NEAR * noise:
                return end(Ending.ROUNDING)
            if found.is_loss:
                return end(Ending.LOSS)
            undamped = steps.take(moved, given, 0.0)
            is_contradiction = float(undamped.descent) < LITTLE
            return end(Ending.CONTRADICTION if is_contradiction else Ending.STALLED)


def measure(
    system: System, moved: list[Array], change: Any, length: float, given: Given
) -> tuple[list[Array], Measured]:
    """The parameters after a step of some length, and how well the constraints then hold."""
    if change is None:
        change = [np.zeros(leaf.shape, leaf.dtype) for leaf in moved]
    new, found = system.compiled_measure(moved, change, np.float32(length), given)
    return new, jax.device_get(found)


class _Length(NamedTuple):
    moved: list[Array]
    measured: Measured
    length: float
    is_loss: bool


def _find_length(
    system: System,
    moved: list[Array],
    change: Sequence[Array],
    given: Given,
    now: Measured,
    descent: float,
    limits: Limits,
) -> _Length:
    """The first of the lengths at which ‖c‖ falls enough and the loss stays in its limit."""
    is_loss = False
    for halvings in range(HALVINGS):
        length = 0.5**halvings
        tried, found = measure(system, moved, change, length, given)
        # Comparisons with what is not a number are false.
        falls = found.size**2 <= (1 - ENOUGH * length * descent) * now.size**2
        is_allowed = not math.isfinite(limits.loss) or found.loss <= limits.loss
        if falls and is_allowed and found.size < now.size:
            return _Length(tried, found, length, is_loss)
        is_loss |= bool(falls and not is_allowed)
    return _Length(moved, now, 0.0, is_loss)


def _is_met(now: Measured, limits: Limits) -> bool:
    pairs = zip(now.violations, limits.tolerances, strict=True)
    is_kept = limits.change is None or bool(now.change <= limits.change * now.outputs)
    return is_kept and all(violation <= tolerance for violation, tolerance in pairs)
