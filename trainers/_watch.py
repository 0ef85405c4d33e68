"""A watch on the logged figures, which says once what goes wrong in a run and what to try."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping

from constrainx.constraints import Composed, Member, Placement
from constrainx.runtime import REMOVED, constraint_metric
from constrainx.step import Method, NullSpace

# Warn if the projection removes more than this share of the gradient in this many logs in a row.
MOST, IN_A_ROW = 0.9, 5
# Warn if a violation stays FAR times above its tolerance and varies by no more than the share STILL
# over this many LOGS, while the mean loss GROWS by this factor from their first half to the second.
FAR, STILL, GROWS, LOGS = 10.0, 0.1, 1.2, 10
# Updates that obey exactly bring any violation that can be removed below its tolerance in a few
# logs. A violation that has not even fallen by this factor over LOGS cannot be removed.
SLOW = 10.0
EXACT = ("update", "twice")
# Warn if a figure exceeds its smallest value so far by this factor, which is no longer noise.
ORDERS = 1e3


class Watch:
    """Finds the usual ways in which constrained runs go wrong, from what is logged anyway.

    - Nearly all of the gradient is projected out, log after log. A run that has found the
      constrained optimum looks like that, too, but there the loss has fallen and the constraints
      are met, and nothing is said.
    - A violation stands still far above its tolerance, while the loss grows; where updates are made
      to obey, a violation that falls slowly counts, too, as the network shrinks to reach it.
    - The loss or a violation is a thousand times its smallest value. Values of a violation below
      its tolerance count as the tolerance. A loss that has fallen by many orders of magnitude may
      rise again by some of them, up to where it began.

    Each is reported once.
    """

    def __init__(self, constraints: Composed | None, method: Method):
        """Starts a watch.

        Args:
            constraints: whose violations to look at, or None.
            method: how the optimizer respects them; what to try depends on it.
        """
        self._members = tuple(constraints or ())
        self._advice = _advise(method, self._members)
        places = _choose_placements(method, self._members)
        self._still = [SLOW if place in EXACT else 1 + STILL for place in places]
        self._told: set[str] = set()
        self._first: float | None = None
        self._smallest: dict[str, float] = {}
        self._losses = _recent()
        self._removed = _recent()
        self._violations = {member.name: _recent() for member in self._members}

    def look(self, step: int, figures: Mapping[str, float]) -> list[str]:
        """Sentences about what goes wrong and has not been reported yet.

        Args:
            step: the number of steps taken.
            figures: the means that are logged at this step.
        """
        loss = figures.get("loss", math.nan)
        self._losses.append(loss)
        # Contradicting constraints also leave nothing of the gradient, but are reported elsewhere.
        resolved = [figures.get(constraint_metric(m.name, "resolved"), 1.0) for m in self._members]
        self._removed.append(figures.get(REMOVED, 0.0) if min(resolved, default=1.0) == 1 else 0.0)
        if self._first is None and math.isfinite(loss):
            self._first = loss
        violations = {}
        for member in self._members:
            name = constraint_metric(member.name, "violation")
            # A constraint that does not act yet is not the cause.
            if name in figures and step > member.start:
                violations[member.name] = figures[name]
                self._violations[member.name].append(figures[name])
        found = [
            ("removed", self._find_removed(violations)),
            ("stands still", self._find_standing_still()),
            *self._find_growth(loss, violations),
        ]
        news = [(kind, sentence) for kind, sentence in found if sentence and kind not in self._told]
        self._told.update(kind for kind, _ in news)
        return [sentence for _, sentence in news]

    def _find_removed(self, violations: Mapping[str, float]) -> str | None:
        shares = list(self._removed)[-IN_A_ROW:]
        loss, first = self._losses[-1], self._first
        if len(shares) < IN_A_ROW or not min(shares) > MOST or first is None:
            return None
        unmet = [m.name for m in self._members if violations.get(m.name, 0.0) > m.tolerance]
        if not unmet and loss < first - 0.1 * abs(first):
            return None
        seen = f"{' and '.join(map(repr, unmet))} not met" if unmet else f"the loss at {loss:.3g}"
        return (
            f"the projection has removed {min(shares):.0%} of the gradient or more in each of the "
            f"last {IN_A_ROW} logs, with {seen}: the constraints leave the loss little to move. "
            f"Try {self._advice}, fewer rows or a larger model"
        )

    def _find_standing_still(self) -> str | None:
        losses, half = list(self._losses), LOGS // 2
        if len(losses) < LOGS:
            return None
        before, now = losses[:half], losses[half:]
        mean = sum(before) / half
        grown = sum(now) / half - mean
        if not (min(now) > max(before) and grown > (GROWS - 1) * abs(mean)):
            return None
        for member, still in zip(self._members, self._still, strict=True):
            values = list(self._violations[member.name])
            if len(values) < LOGS or not min(values) > FAR * member.tolerance:
                continue
            if max(values) <= still * min(values):
                moved = max(values) > (1 + STILL) * min(values)
                stood = "is only down to" if moved else "has stood still at"
                return (
                    f"the violation of {member.name!r} {stood} {values[-1]:.3g}, far "
                    f"above its tolerance of {member.tolerance:g}, over {LOGS} logs in which the "
                    f"loss grew from {losses[0]:.3g} to {losses[-1]:.3g}: the constraint costs "
                    f"accuracy and comes no closer to being met. Try {self._advice}, or a smaller "
                    "learning rate"
                )
        return None

    def _find_growth(
        self, loss: float, violations: Mapping[str, float]
    ) -> Iterator[tuple[str, str | None]]:
        least = 0.0 if self._first is None else abs(self._first) / ORDERS
        yield "loss grows", self._describe_growth("the loss", loss, least)
        for member in self._members:
            value = violations.get(member.name, math.nan)
            what = f"the violation of {member.name!r}"
            # One sentence is enough: where one violation grows like this, others mostly do, too.
            yield "violation grows", self._describe_growth(what, value, member.tolerance)

    def _describe_growth(self, what: str, value: float, least: float) -> str | None:
        if not math.isfinite(value):
            return None
        smallest = min(self._smallest.get(what, value), value)
        self._smallest[what] = smallest
        scale = max(abs(smallest), least)
        if not value >= ORDERS * scale > 0:
            return None
        advice = f"{self._advice}, or " if self._members else ""
        return (
            f"{what} has grown to {value:.3g}, from {smallest:.3g} at its smallest: the run is "
            f"diverging. Try {advice}a smaller learning rate"
        )


def _advise(method: Method, members: tuple[Member, ...]) -> str:
    """What to try if the constraints spoil a run."""
    if not isinstance(method, NullSpace):
        weight = "a smaller `weight`, " if hasattr(method, "weight") else ""
        return f"{weight}a later `start`"
    places = _choose_placements(method, members)
    elsewhere = "" if set(places) == {"gradient"} else '`placement="gradient"`, '
    return f"{elsewhere}a smaller `gamma`, a later `start`"


def _choose_placements(method: Method, members: tuple[Member, ...]) -> list[Placement | None]:
    """Where each constraint is projected by the user's choice, or None if that was left open."""
    if not isinstance(method, NullSpace):
        return [None] * len(members)
    return [method.choose_placement(member) for member in members]


def _recent() -> collections.deque[float]:
    return collections.deque(maxlen=LOGS)
