"""The phases of pruning a network while it trains, as a schedule that one can look at."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phases:
    """Dense, then sparser and sparser, then frozen.

    >>> from constrainx import masks
    >>> print(masks.Phases(density=0.1, steps=1000))
    steps 0 to 99: all weights
    steps 100 to 699: from 100 % of the weights to 10 %, by a cubic
    steps 700 to 999: 10 % of the weights, masks frozen

    The density follows d + (1 − d)(1 − t)³, with t from 0 to 1 between ``begin`` and ``freeze``,
    after Zhu and Gupta, "To prune, or not to prune" (2017): fast while there is much to spare, and
    slow at the end.

    Attributes:
        density: the fraction of weights to keep in the end.
        steps: of the whole training.
        begin: the step at which weights begin to go; a fraction of the steps if below 1.
        freeze: the step at which the masks are frozen; a fraction of the steps if at most 1.
    """

    density: float
    steps: int
    begin: float = 0.1
    freeze: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.density < 1:
            raise ArgumentError(
                "`Phases(density=...)` is the fraction of weights to keep, above 0 and below 1, "
                f"got {self.density!r}."
            )
        if not 0 <= self.first <= self.last:
            raise ArgumentError(
                f"`Phases` must begin before it freezes, got begin={self.begin!r} and "
                f"freeze={self.freeze!r} of {self.steps} steps."
            )
        if self.last >= self.steps:
            raise ArgumentError(
                f"`Phases(freeze={self.freeze!r})` leaves no step to train the weights that stay: "
                f"it must be below {self.steps}."
            )

    @property
    def first(self) -> int:
        """The step at which weights begin to go."""
        return _as_step(self.begin, self.steps, is_fraction=self.begin < 1)

    @property
    def last(self) -> int:
        """The step at which the masks are frozen."""
        return _as_step(self.freeze, self.steps, is_fraction=self.freeze <= 1)

    def target(self, step: Int[Array, ""] | int) -> Float[Array, ""]:
        """The density to have at a step."""
        length = max(self.last - self.first, 1)
        t = jnp.clip((jnp.asarray(step, float) - self.first) / length, 0, 1)
        return self.density + (1 - self.density) * (1 - t) ** 3

    def __str__(self) -> str:
        kept = f"{self.density:.3g}" if self.density < 1e-3 else f"{100 * self.density:.3g} %"
        lines = []
        if self.first > 0:
            lines.append(f"steps 0 to {self.first - 1}: all weights")
        if self.last > self.first:
            between = f"steps {self.first} to {self.last - 1}"
            lines.append(f"{between}: from 100 % of the weights to {kept}, by a cubic")
        lines.append(f"steps {self.last} to {self.steps - 1}: {kept} of the weights, masks frozen")
        return "\n".join(lines)


def _as_step(value: Any, steps: int, *, is_fraction: bool) -> int:
    return math.floor(value * steps + 1e-9) if is_fraction else int(value)
