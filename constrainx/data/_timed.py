"""Sources and transforms of single examples that a stopwatch times."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from constrainx.data._stopwatch import READING, Stopwatch, name_stages


@dataclasses.dataclass(frozen=True)
class TimedSource:
    """Examples by their number, whose reading and decoding is timed.

    Attributes:
        source: the examples.
        watch: what times them.
    """

    source: Any
    watch: Stopwatch

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Any) -> Any:
        return self.watch.time(READING, self.source.__getitem__, index)


@dataclasses.dataclass(frozen=True)
class _TimedRandomMap(grain.transforms.RandomMap):
    transform: grain.transforms.RandomMap
    stage: str
    watch: Stopwatch

    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        return self.watch.time(self.stage, self.transform.random_map, element, rng)


def time_transforms(transforms: Sequence[Any], watch: Stopwatch) -> tuple[Any, ...]:
    """The same transforms of single examples, each of them a stage of its own."""
    timed: list[Any] = []
    for stage, transform in zip(name_stages(transforms), transforms, strict=True):
        if isinstance(transform, grain.transforms.RandomMap):
            timed.append(_TimedRandomMap(transform, stage, watch))
        else:
            change = transform.map if isinstance(transform, grain.transforms.Map) else transform
            timed.append(functools.partial(watch.time, stage, change))
    return tuple(timed)
