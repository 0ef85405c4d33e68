"""Advice in words, from what a diagnosis found."""

from __future__ import annotations

import math
from collections.abc import Iterator

from constrainx.checks._diagnosis import Diagnosed, Diagnosis

# Beyond this, a step in float32 loses half of its digits or more.
POOR_CONDITION = 1e3
# The share of the gradient's squared norm that must be left for the loss to fall.
LITTLE = 0.01
# In units of the loss and its gradient.
EXPENSIVE = 3.0


def advise(found: Diagnosis) -> tuple[str, ...]:
    """What to do, in sentences; one that all is well if there is nothing to do."""
    advice = [
        *_about_contradictions(found),
        *(sentence for one in found.constraints for sentence in _about_rows(one)),
        *_about_all(found),
        *(sentence for one in found.constraints for sentence in _about_cost(one, found)),
    ]
    return tuple(advice) or ("No problems found.",)


def _about_contradictions(found: Diagnosis) -> Iterator[str]:
    for names in found.contradictions:
        if len(names) == 1:
            yield (
                f"The rows of {names[0]} contradict each other: no step meets all of them. Use "
                "fewer rows or a larger network, or make it a goal with method=cx.Penalty()."
            )
        elif len(names) == 2:
            yield (
                f"{names[0]} and {names[1]} contradict each other: no step meets both. Drop or "
                "loosen one of them."
            )
        else:
            yield (
                f"{', '.join(names)} contradict each other, though no two of them do: no step "
                "meets all. Drop or loosen one of them."
            )


def _about_rows(one: Diagnosed) -> Iterator[str]:
    if one.nonfinite:
        yield (
            f"{one.nonfinite} of {one.rows} rows of {one.name}, or their gradients, are not "
            "finite: look for a division by zero, a root or logarithm at zero, or an overflow."
        )
    if one.stuck:
        yield (
            f"{one.stuck} of {one.rows} rows of {one.name} are violated and have no gradient, so "
            "no step can fix them: look for a stop_gradient, a saturated activation, a clipped or "
            "integer operation in its residual, or a `wrt` without what it depends on."
        )
    elif one.dead == one.rows and not one.nonfinite:
        yield f"{one.name} holds, and has no gradient here: it does not act at this point."
    alive = one.rows - one.dead
    if one.rank_is_exact and 0 < one.rank < alive:
        yield (
            f"The {alive} rows of {one.name} that have a gradient span {one.rank} dimensions: "
            f"{one.rank} rows would say the same, such as reduce=cx.Sketch(rows={one.rank})."
        )
    if one.condition > POOR_CONDITION:
        yield (
            f"The rows of {one.name} are nearly dependent (condition {one.condition:.1e}): steps "
            "are inexact in float32. Use fewer rows, or compute in float64."
        )


def _about_all(found: Diagnosis) -> Iterator[str]:
    alone = max((one.condition for one in found.constraints), default=math.nan)
    if found.condition > POOR_CONDITION and not alone > POOR_CONDITION:
        yield (
            f"Together the rows are nearly dependent (condition {found.condition:.1e}), though "
            "those of each constraint are not: two constraints say nearly the same thing."
        )
    shared = sum(one.rank for one in found.constraints) - found.rank
    if found.rank_is_exact and shared > 0:
        dimensions = "1 dimension" if shared == 1 else f"{shared} dimensions"
        yield (
            f"Constraints share {dimensions} of their rows: some of them say the same thing twice. "
            "That is harmless as long as they do not contradict each other."
        )
    if found.rank >= found.parameters:
        yield (
            "The rows take every direction that the parameters have: nothing is left for the loss. "
            "Use fewer rows, or a larger network."
        )
    elif math.sin(math.radians(found.angle)) ** 2 < LITTLE:
        yield (
            "Almost all of the loss's gradient lies in the span of the rows, so the loss can "
            "hardly fall: use fewer rows, let the constraint `start` later, or train a larger "
            "network."
        )


def _about_cost(one: Diagnosed, found: Diagnosis) -> Iterator[str]:
    if found.loss is None or one.cost.seconds <= EXPENSIVE * found.loss.seconds:
        return
    # The fixed price of a call, below which there is nothing to gain.
    if one.cost.seconds > 5e-3:
        times = one.cost.seconds / found.loss.seconds
        yield (
            f"{one.name} takes {times:.2g} times as long as the loss: "
            "use fewer examples with `examples=`, fewer rows with Norm(groups=...) or "
            "Sketch(rows=...), or let it act less often with `every=`."
        )
