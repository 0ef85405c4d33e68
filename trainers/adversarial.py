"""Attacks on a classifier within a box around each input (PGD; Madry et al., 2018)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from constrainx.errors import ArgumentError
from constrainx.trainers.classification import cross_entropy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attack:
    """Projected gradient ascent on the loss, in the box ‖x' − x‖∞ ≤ radius and in [low, high].

    Starts from the input itself and, with restarts, from random points of the box; of all points
    visited, the one with the highest loss counts, so that more steps or restarts are never weaker.

    Attributes:
        radius: of the box.
        steps: of ascent.
        step_size: of each, as a part of the radius.
        restarts: from random points, in addition.
        low: the least value that an input may have.
        high: the largest.
    """

    radius: float
    steps: int = 7
    step_size: float = 0.3
    restarts: int = 0
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if self.radius < 0 or self.steps < 0 or self.restarts < 0 or self.step_size <= 0:
            raise ArgumentError(
                "`Attack` needs radius, steps and restarts of at least 0 and a positive step_size, "
                f"got {self}."
            )

    def __call__(
        self, model: Any, x: Float[Array, "batch ..."], y: Int[Array, " batch"], key: Array
    ) -> Float[Array, "batch ..."]:
        """The worst inputs found, as constants: no gradient goes through the attack."""
        found = self._ascended(model, x, x, y)
        for index in range(self.restarts):
            shift = jax.random.uniform(
                jax.random.fold_in(key, index), x.shape, minval=-self.radius, maxval=self.radius
            )
            other = self._ascended(model, self._into_box(x + shift, x), x, y)
            found = _worse(losses(model, y), found, other)
        return jax.lax.stop_gradient(found)

    def _ascended(self, model: Any, start: Array, x: Array, y: Array) -> Array:
        loss = losses(model, y)
        slope = jax.grad(lambda x: jnp.sum(loss(x)))

        def step(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
            current, worst = carry
            moved = current + self.step_size * self.radius * jnp.sign(slope(current))
            moved = self._into_box(moved, x)
            return (moved, _worse(loss, worst, moved)), None

        (_, worst), _ = jax.lax.scan(step, (start, start), length=self.steps)
        return worst

    def _into_box(self, moved: Array, x: Array) -> Array:
        inside = jnp.clip(moved, x - self.radius, x + self.radius)
        return jnp.clip(inside, self.low, self.high)


def losses(model: Any, y: Int[Array, " batch"]) -> Callable[[Array], Float[Array, " batch"]]:
    """The cross-entropy of each example."""
    return lambda x: cross_entropy(model, {"x": x, "y": y})


def _worse(loss: Callable[[Array], Array], first: Array, second: Array) -> Array:
    """For each example, the input with the higher loss."""
    chosen = loss(second) > loss(first)
    return jnp.where(chosen.reshape(-1, *[1] * (first.ndim - 1)), second, first)
