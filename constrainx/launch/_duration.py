"""Durations as SLURM writes them."""

from __future__ import annotations

import re

from constrainx.errors import ArgumentError


def read_seconds(text: str) -> int:
    """How many seconds a duration has.

    >>> read_seconds("90"), read_seconds("24:00:00"), read_seconds("7-12")
    (5400, 86400, 648000)

    Args:
        text: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or
            days-hours:minutes:seconds.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None or not any(int(part or 0) for part in found.groups()):
        raise ArgumentError(
            f"`--time` must be a duration such as 24:00:00 or 7-00:00:00, got {text!r}."
        )
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
