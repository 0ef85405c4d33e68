"""The largest batch that fits, found by compiling the step for several."""

from __future__ import annotations

from collections.abc import Callable

# How much of a device's memory a step may take: the rest is for CUDA, libraries and fragments.
USABLE = 0.9
# The answer is at most this much too small.
CLOSE = 0.05


def find_largest(measure: Callable[[int], int], *, limit: float, unit: int, start: int) -> int:
    """The largest multiple of ``unit`` whose peak is within the limit, to five per cent; 0 if none.

    The peak grows nearly in proportion to the batch, so the next guess is on the line through two
    known points, and the middle where the line leaves the bracket.

    >>> find_largest(lambda batch: 1000 + 7 * batch, limit=8000, unit=8, start=64)
    1000

    Args:
        measure: batch ↦ bytes of the peak.
        limit: how many bytes there are.
        unit: what batches must be multiples of.
        start: where to begin.
    """
    known: dict[int, int] = {}

    def fits(batch: int) -> bool:
        if batch not in known:
            known[batch] = measure(batch)
        return known[batch] <= limit

    def guess() -> int:
        (first, low), (last, high) = min(known.items()), max(known.items())
        slope = (high - low) / (last - first) if last > first else 0
        return int(first + (limit - low) / slope) if slope > 0 else 4 * last

    good, bad = 0, None
    trial = max(start // unit, 1) * unit
    while True:
        if fits(trial):
            good = max(good, trial)
        else:
            bad = trial if bad is None else min(bad, trial)
        if bad is not None and bad - good <= max(unit, CLOSE * good):
            return good
        wanted = guess() // unit * unit if len(known) > 1 else (2 * trial if good else trial // 2)
        if bad is None:
            trial = max(wanted, good + unit)
            if good and wanted <= good * (1 + CLOSE) and len(known) > 1:
                trial = good + max(int(CLOSE * good) // unit, 1) * unit
        else:
            low, high = good + unit, bad - unit
            inside = low <= wanted <= high and wanted not in known
            trial = wanted if inside else (good + bad) // 2 // unit * unit
            trial = min(max(trial, low), high)
