"""Where the time of a batch goes, by the stages that it passes through."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
READING = "reading"


class Stopwatch:
    """Adds up the seconds that are spent in each stage.

    Stages must not contain each other, and must run in one thread.

    >>> watch = Stopwatch()
    >>> watch.time("sorting", sorted, [3, 1, 2])
    [1, 2, 3]
    >>> list(watch.seconds)
    ['sorting']

    Attributes:
        seconds: of each stage, in the order in which they first came.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, stage: str, function: Callable[..., T], *args: Any) -> T:
        """Calls the function, and counts its time for this stage."""
        start = time.perf_counter()
        try:
            return function(*args)
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def name_stages(changes: Sequence[Any]) -> tuple[str, ...]:
    """The name of each function, or of its class; with a number from the second of a name on."""
    names = [getattr(change, "__name__", type(change).__name__) for change in changes]
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return tuple(numbered)
