"""What polishing did to a model, in figures and in words."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from constrainx.checks import figure, lay_out, wrap
from constrainx.polishing._search import Ending, Stride


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolishedConstraint:
    """One constraint before and after.

    Attributes:
        name: of the constraint.
        before: its violation at the given points, before.
        after: its violation at the given points, after.
        held_out_before: that at the held-out points, before; None if there are none.
        held_out_after: that at the held-out points, after; None if there are none.
        tolerance: what the violation was to be at most; zero for rounding.
        rows: how many it had; zero if its nearest point was known.
        met: whether it holds at the given points.
    """

    name: str
    before: float
    after: float
    held_out_before: float | None
    held_out_after: float | None
    tolerance: float
    rows: int
    met: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Polished:
    """What `polish` did. Print it for a table.

    Attributes:
        constraints: an entry for each.
        ending: why it ended: "met", "rounding", "contradiction", "loss", "no descent", "stalled",
            "steps" or "not finite".
        reason: the same in a sentence.
        steps: the steps that were taken.
        loss: at the given points, before and after; None if no loss was given.
        change: the root mean square of what became different in the outputs to be kept, relative to
            that of the outputs; None if none were to be kept.
        moved: how far the parameters moved, relative to their norm.
    """

    constraints: tuple[PolishedConstraint, ...]
    ending: Ending
    reason: str
    steps: tuple[Stride, ...]
    loss: tuple[float, float] | None
    change: float | None
    moved: float

    @property
    def met(self) -> bool:
        """Whether every constraint holds at the given points."""
        return all(found.met for found in self.constraints)

    def __getitem__(self, name: str) -> PolishedConstraint:
        for found in self.constraints:
            if found.name == name:
                return found
        raise KeyError(name)

    def __str__(self) -> str:
        is_held_out = any(found.held_out_after is not None for found in self.constraints)
        headings = ["constraint", "before", "after"]
        headings += ["held out", "after"] * is_held_out + ["tolerance", "met"]
        rows = []
        for found in self.constraints:
            figures = [found.before, found.after]
            figures += [found.held_out_before, found.held_out_after] * is_held_out  # type: ignore[list-item]
            limit = figure(found.tolerance) if found.tolerance else "rounding"
            rows.append([found.name, *map(figure, figures), limit, "yes" if found.met else "NO"])
        lines = lay_out(headings, rows)
        for sentence in self.describe():
            lines += wrap(sentence)
        return "\n".join(lines)

    def describe(self) -> list[str]:
        """What there is to know beside the violations, a sentence each."""
        sentences = [self.reason]
        if self.loss is not None:
            sentences.append(f"loss: {figure(self.loss[0])} before, {figure(self.loss[1])} after.")
        change = f"the parameters moved by {figure(self.moved)} of their norm"
        if self.change is not None:
            change += f", the outputs to be kept by {figure(self.change)} of theirs"
        sentences.append(f"{change}.")
        short = sum(not stride.converged for stride in self.steps)
        if short:
            sentences.append(
                f"the solver ran out of iterations in {short} of {len(self.steps)} steps, which "
                "are then shorter than they might be."
            )
        return sentences

    def as_record(self) -> dict[str, Any]:
        """What is written to a JSON file, with None for what is not a finite number."""
        return {"met": self.met, **_as_json(dataclasses.asdict(self))}


def explain(
    ending: Ending, steps: int, *, unmet: list[str], dead: list[str], is_kept: bool, is_exact: bool
) -> str:
    """Why polishing ended, in words.

    Args:
        ending: the reason.
        steps: how many were taken.
        unmet: the names of constraints that do not hold.
        dead: those whose rows no parameter moves.
        is_kept: whether outputs were to stay exactly as they are.
        is_exact: whether steps were solved with stored rows, not by iterations.
    """
    after = f"after {steps} step{'' if steps == 1 else 's'}"
    names = ", ".join(unmet) or "the rows"
    if dead and ending is not Ending.MET:
        return (
            f"{', '.join(dead)}: no parameter that may move changes its rows; check `wrt`, and "
            f"whether `of` looks at the model. Ended {after}."
        )
    match ending:
        case Ending.MET:
            return f"{after}, every constraint holds at the given points."
        case Ending.ROUNDING:
            beyond = "; in float64 more is possible" if unmet else ""
            return f"{after}, the rows are zero to the last digit of the parameters{beyond}."
        case Ending.CONTRADICTION:
            kept = " and the outputs that are to stay as they are" if is_kept else ""
            if not is_exact:
                return (
                    f"{after}, the iterations of the solver no longer find a change that lowers "
                    f"what is left of {names}: these rows{kept} contradict each other, are more "
                    "than the network can meet, or depend too nearly on each other for this "
                    "precision. Take fewer points, a smaller `weight`, or float64."
                )
            return (
                f"{after}, no change of the parameters lowers what is left of {names}, to first "
                f"order: these rows{kept} contradict each other, or there are more of them than "
                "the network can meet. Take fewer points, or a larger network."
            )
        case Ending.LOSS:
            return (
                f"{after}, every step that lowers {names} further raises the loss above "
                "`most_loss`."
            )
        case Ending.NO_DESCENT:
            return (
                f"{after}, no step lowers {names}, however short. Are the residuals smooth, and "
                "the same in each call?"
            )
        case Ending.STALLED:
            return (
                f"{after}, progress has become so slow that it ended; {names} do not hold. The "
                "rows are nearly dependent, or curve too much: take fewer points, or train longer "
                "under the constraints."
            )
        case Ending.STEPS:
            return f"{after}, the most that were allowed, {names} do not hold: raise `max_steps`."
        case Ending.NOT_FINITE:
            return (
                f"the rows are not finite at the start, so nothing was changed: {names}. The "
                "model or the data has NaN or infinite values."
            )


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
