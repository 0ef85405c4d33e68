"""Compares the settings that a checkpoint recorded with those of the trainer that restores it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from constrainx.constraints import Composed

ABSENT = "nothing"


def describe_constraints(composed: Composed | None) -> dict[str, Any]:
    """The γ of each constraint that acts in training, by name, in the form that is recorded."""
    if composed is None:
        return {}
    return {
        member.name: member.gamma if isinstance(member.gamma, int | float) else "a schedule"
        for member in composed
    }


def find_differences(
    recorded: Any, given: Mapping[str, Any], *, without: Collection[str] = ()
) -> list[str]:
    """A phrase for each setting that was different when the checkpoint was saved.

    >>> find_differences({"seed": 0, "batch": 8}, {"seed": 1, "batch": 8})
    ['seed was 0, now 1']

    Args:
        recorded: what the checkpoint has, or None if it was saved before that was recorded.
        given: what the trainer has now.
        without: names that may differ.
    """
    if not isinstance(recorded, Mapping):
        return []
    now = json.loads(json.dumps(dict(given), default=str))
    return [
        f"{name} was {recorded.get(name, ABSENT)!r}, now {now.get(name, ABSENT)!r}"
        for name in sorted({*recorded, *now})
        if name not in without and recorded.get(name) != now.get(name)
    ]
