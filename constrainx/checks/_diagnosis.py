"""What `diagnose` finds, and how it is shown."""

from __future__ import annotations

import dataclasses
import math

from constrainx.checks._cost import Cost
from constrainx.checks._table import figure, lay_out, percent, wrap


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """What was found about one constraint at a point.

    Attributes:
        name: of the constraint.
        rows: how many it has.
        rank: the numerical rank of its Jacobian, with rows at unit length.
        rank_is_exact: whether the rank is that, or at least that.
        directions: how many directions of the parameters its rows hold: Σ σ²/(σ² + m), with the
            singular values σ of its Jacobian and the damping m. This is the rank if it has none;
            NaN if there are too many rows to tell.
        condition: largest over smallest singular value of these rows, within the rank; where rows
            are too many to be stored, an estimate from below.
        dead: how many rows have no gradient, or one that is nothing but rounding.
        stuck: how many of these are violated, so that no step can fix them.
        nonfinite: how many rows are not finite, or have a gradient that is not.
        violation: the root mean square of its rows.
        angle: in degrees, between the gradient of the loss and the span of its rows; NaN without a
            loss. At 90 it takes nothing from the gradient, at 0 everything.
        placement: where its rows are projected, or "none" if the method does not project.
        reason: why it is projected there.
        cost: of a projection on only its rows, or of its gradient for other methods.
        tolerance: the constraint's own.
    """

    name: str
    rows: int
    rank: int
    rank_is_exact: bool
    directions: float
    condition: float
    dead: int
    stuck: int
    nonfinite: int
    violation: float
    angle: float
    placement: str
    reason: str
    cost: Cost
    tolerance: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found about all constraints at a point. Made by `diagnose`; print it for a table.

    Attributes:
        constraints: one entry for each.
        parameters: how many there are.
        rank: of all rows together.
        rank_is_exact: whether the rank is that, or at least that.
        condition: of all rows together.
        angle: between the gradient of the loss and the span of all rows.
        loss: the cost of the loss and its gradient; None without a loss.
        solver: how the rows are solved for.
        reason: why that solver.
        contradictions: names of constraints that no step can meet together: in pairs, all that
            contradict each other only together, or one whose own rows do.
        how: how ranks and angles were computed.
        advice: what to do about it, in sentences.
    """

    constraints: tuple[Diagnosed, ...]
    parameters: int
    rank: int
    rank_is_exact: bool
    condition: float
    angle: float
    loss: Cost | None
    solver: str
    reason: str
    contradictions: tuple[tuple[str, ...], ...]
    how: str
    advice: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """How many rows all constraints have."""
        return sum(found.rows for found in self.constraints)

    def __getitem__(self, name: str) -> Diagnosed:
        for found in self.constraints:
            if found.name == name:
                return found
        raise KeyError(name)

    def __str__(self) -> str:
        headings = ["constraint", "rows", "rank", "condition", "dead", "rms", "angle", "time"]
        everything = ["all", f"{self.rows}", _rank(self), figure(self.condition), "", ""]
        body = [
            [
                found.name,
                f"{found.rows}",
                _rank(found),
                figure(found.condition),
                f"{found.dead}",
                figure(found.violation),
                _degrees(found.angle),
                self._compare(found.cost),
            ]
            for found in self.constraints
        ]
        lines = lay_out(headings, [*body, [*everything, _degrees(self.angle), ""]])
        for sentence in [*self._facts(), *self.advice]:
            lines += wrap(sentence)
        return "\n".join(lines)

    def _facts(self) -> list[str]:
        facts = [
            f"{self.parameters:,} parameters. Ranks, conditions and angles: {self.how}.",
            f"Solver: {self.solver}, because {self.reason}.",
        ]
        facts += [
            f"{found.name}: projected {_place(found.placement)}, because {found.reason}."
            if found.placement != "none"
            else f"{found.name}: not projected, because {found.reason}."
            for found in self.constraints
        ]
        facts += [
            f"{found.name}: with its damping, the rows hold {figure(found.directions)} of "
            f"{_rank(found)} directions."
            for found in self.constraints
            if found.rank > 0 and abs(found.directions - found.rank) > 1e-3 * found.rank
        ]
        if self.loss is not None:
            facts.append(
                f"Loss and gradient take {_seconds(self.loss.seconds)}{_operations(self.loss)}. A "
                "time above is that of the constraint's part of a step, in units of this; "
                "operations: "
                + "; ".join(
                    f"{found.name} {_times(found.cost.operations, self.loss.operations)}"
                    for found in self.constraints
                )
                + "."
            )
        if not math.isnan(self.angle):
            left = math.sin(math.radians(self.angle)) ** 2
            facts.append(f"The rows leave {percent(left)} of the loss gradient's squared norm.")
        return facts

    def _compare(self, cost: Cost) -> str:
        if self.loss is None:
            return _seconds(cost.seconds)
        return f"{cost.seconds / self.loss.seconds:.2g}×"


def _rank(found: Diagnosed | Diagnosis) -> str:
    return f"{found.rank}" if found.rank_is_exact else f"≥ {found.rank}"


def _degrees(angle: float) -> str:
    return "–" if math.isnan(angle) else f"{angle:.1f}°"


def _place(placement: str) -> str:
    return {"twice": "twice", "gradient": "in the gradient", "update": "in the update"}[placement]


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _operations(cost: Cost) -> str:
    return "" if not cost.operations else f" and {cost.operations:.3g} operations"


def _times(operations: float | None, reference: float | None) -> str:
    if not operations or not reference:
        return "unknown"
    return f"{operations / reference:.2g}×"
