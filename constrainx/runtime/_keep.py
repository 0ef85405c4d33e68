"""Which checkpoints stay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from orbax.checkpoint import checkpoint_managers as policies

from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints to keep. One that matches any of these rules stays.

    Attributes:
        last: keep this many of the newest.
        best: keep this many of the best, by the monitored metric.
        every: keep every checkpoint whose step is a multiple of this; None for no such rule.
    """

    last: int = 3
    best: int = 1
    every: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ArgumentError(f"`Keep(last=...)` must be at least 1, got {self.last!r}.")
        if self.best < 0:
            raise ArgumentError(f"`Keep(best=...)` must be at least 0, got {self.best!r}.")
        if self.every is not None and self.every < 1:
            raise ArgumentError(
                f"`Keep(every=...)` must be at least 1 or None, got {self.every!r}."
            )


def as_policy(keep: Keep, ranks: Mapping[int, float] | None) -> Any:
    """The rules as a preservation policy of Orbax.

    Args:
        keep: the rules.
        ranks: of the monitored metric by step, larger is better; None if none is monitored.
    """
    preserved: list[Any] = [policies.LatestN(n=keep.last)]
    if keep.every is not None:
        preserved.append(policies.EveryNSteps(interval_steps=keep.every))
    if ranks is not None and keep.best:
        preserved.append(_BestSteps(rank=ranks, count=keep.best))
    return policies.AnyPreservationPolicy(preserved)


@dataclasses.dataclass
class _BestSteps(policies.PreservationPolicy):
    """Keeps the best steps, including those that an earlier process saved.

    Orbax's own `BestN` has no metrics for those.
    """

    rank: Mapping[int, float]
    count: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        del context
        ranks = {info.step: self.rank.get(info.step, -math.inf) for info in checkpoints}
        ranked = [step for step in ranks if ranks[step] > -math.inf]
        best = sorted(ranked, key=lambda step: (ranks[step], -step))[-self.count :]
        return [info.step in best for info in checkpoints]
