"""What becomes of the probabilities in a step of pruning: learned, or read off the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from constrainx.constraints.masks._pattern import Pattern, keep_in_groups
from constrainx.constraints.masks._phases import Phases
from constrainx.constraints.masks._select import find_cut, keep_largest

# Where a mask is frozen. Beyond [0, 1], so that no rounding makes it uncertain again.
KEPT, DROPPED = 2.0, -1.0
# A weight on the edge of being kept starts with this p: far enough from 1 to change its mind late.
EDGE = 10.0
MOMENTUM = 0.9
# Of a score on the edge: above it, scores times the scale are finite.
SMALLEST = 1e-30


class Memory(NamedTuple):
    """What a rule remembers.

    Attributes:
        momentum: the running mean of the gradient of each probability.
        scale: κ, probabilities per unit of score.
    """

    momentum: list[Float[Array, ...]]
    scale: Float[Array, ""]


class Seen(NamedTuple):
    """What a rule sees of a step.

    Attributes:
        step: how many steps have been taken.
        weights: after this step.
        probabilities: before it.
        gradients: of the probabilities, which are w ∂L/∂(w m).
        sizes: √ν̂ of the weights, or None if the optimizer does not keep it.
    """

    step: Int[Array, ""]
    weights: list[Float[Array, ...]]
    probabilities: list[Float[Array, ...]]
    gradients: list[Float[Array, ...]]
    sizes: list[Float[Array, ...]] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
    """Probabilities that start from the weights and then follow the straight-through gradient.

    At the first step of pruning p = κ·½w²√ν̂, with κ such that the edge of the final density is at
    ten. From then on p ← p − ρ κ η μ, where η is the learning rate of the weights, and μ the
    running mean of the gradient w ∂L/∂(w m); the budget is up to a `MaskBudget`. For weights kept,
    Adam's own step changes ½w²√ν by −η w ĝ, which is this step at ρ = 1: so p is magnitude in
    Adam's metric for weights that are kept, and says what a weight would be worth for those that
    are not. Scaling each coordinate of p, as Adam would, loses that.

    Attributes:
        phases: when.
        learning_rate: of the weights, a number or a schedule.
        strength: ρ.
        patterns: of each array of masks.
    """

    phases: Phases
    learning_rate: float | Callable[[Any], Any]
    strength: float
    patterns: tuple[Pattern | None, ...]

    def start(self, probabilities: Sequence[Array]) -> Memory:
        """What it remembers before the first step."""
        return Memory([jnp.zeros_like(p) for p in probabilities], jnp.zeros(()))

    def move(self, seen: Seen, memory: Memory) -> tuple[list[Float[Array, ...]], Memory]:
        """The updates of the probabilities."""
        momentum = [
            MOMENTUM * old + (1 - MOMENTUM) * new
            for old, new in zip(memory.momentum, seen.gradients, strict=True)
        ]
        rate = self.learning_rate
        eta = rate(seen.step) if callable(rate) else rate
        first, last = self.phases.first, self.phases.last

        def begin() -> tuple[list[Array], Array]:
            values, scale = self._score(seen)
            return _difference(values, seen.probabilities), scale

        def learn() -> tuple[list[Array], Array]:
            is_learning = (first < seen.step) & (seen.step < last)
            pace = jnp.where(is_learning, self.strength * memory.scale * eta, 0)
            return [(-pace * m).astype(m.dtype) for m in momentum], memory.scale

        def freeze() -> tuple[list[Array], Array]:
            values = self._score(seen)[0] if first == last else seen.probabilities
            kept = decide(values, seen.weights, self.patterns, self.phases.density)
            return _difference(kept, seen.probabilities), memory.scale

        branch = jnp.where(seen.step == last, 2, jnp.where(seen.step == first, 1, 0))
        moved, scale = jax.lax.switch(branch, (learn, begin, freeze))
        return moved, Memory(momentum, scale)

    def _score(self, seen: Seen) -> tuple[list[Array], Array]:
        sizes = seen.sizes or [jnp.ones(()) for _ in seen.weights]
        scores = [0.5 * w * w * s for w, s in zip(seen.weights, sizes, strict=True)]
        count = round(self.phases.density * sum(score.size for score in scores))
        edge = find_cut(scores, count)
        # Where most weights are zero, so is the edge, and no scale brings it to ten.
        scale = EDGE / jnp.maximum(edge, SMALLEST)
        scores = [score * scale for score in scores]
        return [s.astype(p.dtype) for s, p in zip(scores, seen.probabilities, strict=True)], scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Magnitude:
    """Masks that keep the largest weights, chosen anew every few steps while there are too many.

    Gradual magnitude pruning, after Zhu and Gupta (2017). If the phases begin and freeze at the
    same step, it is one-shot pruning.

    Attributes:
        phases: when.
        every: how many steps lie between two choices.
        patterns: of each array of masks.
    """

    phases: Phases
    every: int
    patterns: tuple[Pattern | None, ...]

    def start(self, probabilities: Sequence[Array]) -> Memory:
        """Nothing to remember."""
        del probabilities
        return Memory([], jnp.zeros(()))

    def move(self, seen: Seen, memory: Memory) -> tuple[list[Float[Array, ...]], Memory]:
        """The updates of the probabilities."""
        first, last = self.phases.first, self.phases.last
        is_due = ((seen.step - first) % self.every == 0) | (seen.step == last)

        def choose() -> list[Array]:
            sizes = [jnp.abs(weight) for weight in seen.weights]
            density = jnp.where(
                seen.step >= last, self.phases.density, self.phases.target(seen.step)
            )
            kept = decide(sizes, sizes, self.patterns, density, target=density)
            kept = [k.astype(p.dtype) for k, p in zip(kept, seen.probabilities, strict=True)]
            return _difference(kept, seen.probabilities)

        moved = jax.lax.cond(
            is_due & (seen.step >= first) & (seen.step <= last),
            choose,
            lambda: [jnp.zeros_like(p) for p in seen.probabilities],
        )
        return moved, memory


def decide(
    values: Sequence[Array],
    weights: Sequence[Array],
    patterns: Sequence[Pattern | None],
    density: float | Array,
    *,
    target: Array | None = None,
) -> list[Float[Array, ...]]:
    """Probabilities that are certain: the largest values are kept, ties decided by the weights.

    Args:
        values: what to go by.
        weights: for ties.
        patterns: of each array; those without one share the density.
        density: of all masks without a pattern.
        target: the density on the way to a pattern, which then keeps more of each group.
    """
    free = [i for i, pattern in enumerate(patterns) if pattern is None]
    size = sum(values[i].size for i in free)
    count = jnp.round(density * size).astype(jnp.int32)
    ties = [jnp.abs(weight) for weight in weights]
    flags: dict[int, Array] = {}
    if free:
        chosen = keep_largest([values[i] for i in free], [ties[i] for i in free], count)
        flags = dict(zip(free, chosen, strict=True))
    for i, pattern in enumerate(patterns):
        if pattern is not None:
            kept = pattern.kept if target is None else jnp.ceil(target * pattern.group - 1e-3)
            flags[i] = keep_in_groups(values[i], ties[i], pattern.group, kept)
    return [
        jnp.where(flags[i], KEPT, DROPPED).astype(value.dtype) for i, value in enumerate(values)
    ]


def _difference(new: Sequence[Array], old: Sequence[Array]) -> list[Array]:
    return [n.astype(o.dtype) - o for n, o in zip(new, old, strict=True)]
