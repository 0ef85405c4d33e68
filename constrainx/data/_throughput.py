"""How fast batches come if nothing is done with them, and what takes the time."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from constrainx.data._batches import Batches
from constrainx.data._prefetch import prefetch
from constrainx.data._stopwatch import READING, Stopwatch
from constrainx.errors import ArgumentError

BATCHING, PLACING = "batching", "placing"


@dataclasses.dataclass(frozen=True)
class Throughput:
    """How fast batches come.

    Attributes:
        rate: examples a second, read as in training.
        batches: how many batches that was measured on.
        stages: seconds an example in each stage, measured in one thread, without workers.
    """

    rate: float
    batches: int
    stages: Mapping[str, float]


def measure_throughput(
    data: Batches, *, seconds: float = 5.0, place: Callable[[Any], Any] = lambda batch: batch
) -> Throughput:
    """Reads batches without a model behind.

    First as in training: ahead in a thread, unless that would cost more than it gains, and with the
    workers of the data. Then once more in one thread, because only there do the times of the stages
    add up. Stages are "reading", with decoding; each transform by its name; "batching", where
    examples are read one by one; and "placing". Of data that cannot be taken apart, such as a
    function that draws it, all is reading.

    Args:
        data: the batches.
        seconds: how long to read, each time; at least one batch after the first, which is not
            counted, because it waits for workers to start.
        place: puts a batch on the devices, and waits until it is there.

    >>> import constrainx.data, numpy as np
    >>> flip = constrainx.data.transforms.RandomFlip()
    >>> arrays = {"x": np.zeros((8, 4, 4, 1), np.float32)}
    >>> data = constrainx.data.arrays(arrays, batch=4, transforms=[flip])
    >>> found = constrainx.data.measure_throughput(data, seconds=0.01)
    >>> print(found.rate > 0, *found.stages)
    True reading RandomFlip placing
    """
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ArgumentError(f"`seconds` must be a positive number, got {seconds!r}.")
    ahead = data.from_step(0)
    if not data.is_cheap:
        ahead = prefetch(ahead)
    batches, spent = _read(ahead, place, seconds, Stopwatch())
    return Throughput(batches * data.batch / spent, batches, _time_stages(data, place, seconds))


def _time_stages(data: Batches, place: Callable[[Any], Any], seconds: float) -> Mapping[str, float]:
    """Seconds an example in each stage."""
    watch = Stopwatch()
    batches, spent = _read(data.timed_by(watch).from_step(0), place, seconds, watch)
    stages = dict(watch.seconds)
    # What no stage has counted: indexing of arrays, or making a batch of examples that were read.
    rest = max(spent - sum(stages.values()), 0.0)
    placing = stages.pop(PLACING)
    stages = {**stages, BATCHING: rest} if READING in stages else {READING: rest, **stages}
    stages[PLACING] = placing
    return {stage: one / (batches * data.batch) for stage, one in stages.items()}


def _read(
    batches: Iterator[Any], place: Callable[[Any], Any], seconds: float, watch: Stopwatch
) -> tuple[int, float]:
    """How many batches came after the first, and in how many seconds; closes the iterator."""
    try:
        place(next(batches))
        watch.seconds.clear()
        count, start = 0, time.perf_counter()
        while count == 0 or time.perf_counter() - start < seconds:
            watch.time(PLACING, place, next(batches))
            count += 1
        return count, time.perf_counter() - start
    finally:
        if hasattr(batches, "close"):
            batches.close()
