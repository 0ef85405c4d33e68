"""Adversarial attacks on a classifier, in a box around each input (PGD; Madry et al., 2018)."""

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

    It starts from the input itself and, with restarts, from random points of the box. The result is
    the visited point with the highest loss, so that more steps or restarts never make it weaker.

    Attributes:
        radius: half the side of the box.
        steps: the number of ascent steps.
        step_size: the length of a step, as a fraction of the radius.
        restarts: the number of additional starts from random points.
        low: the lowest value that an input may have.
        high: the highest value that an input may have.
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
        """The worst inputs that were found. No gradient passes through the attack."""
        found = self._ascend(model, x, x, y)
        for index in range(self.restarts):
            shift = jax.random.uniform(
                jax.random.fold_in(key, index), x.shape, minval=-self.radius, maxval=self.radius
            )
            other = self._ascend(model, self._clip_to_box(x + shift, x), x, y)
            found = _pick_worse(losses(model, y), found, other)
        return jax.lax.stop_gradient(found)

    def _ascend(self, model: Any, start: Array, x: Array, y: Array) -> Array:
        loss = losses(model, y)
        slope = jax.grad(lambda x: jnp.sum(loss(x)))

        def step(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
            current, worst = carry
            moved = current + self.step_size * self.radius * jnp.sign(slope(current))
            moved = self._clip_to_box(moved, x)
            return (moved, _pick_worse(loss, worst, moved)), None

        (_, worst), _ = jax.lax.scan(step, (start, start), length=self.steps)
        return worst

    def _clip_to_box(self, moved: Array, x: Array) -> Array:
        inside = jnp.clip(moved, x - self.radius, x + self.radius)
        return jnp.clip(inside, self.low, self.high)


def losses(model: Any, y: Int[Array, " batch"]) -> Callable[[Array], Float[Array, " batch"]]:
    """The function from inputs to the cross-entropy of each example."""
    return lambda x: cross_entropy(model, {"x": x, "y": y})


def _pick_worse(loss: Callable[[Array], Array], first: Array, second: Array) -> Array:
    """Whichever of two inputs has the higher loss, for each example."""
    chosen = loss(second) > loss(first)
    return jnp.where(chosen.reshape(-1, *[1] * (first.ndim - 1)), second, first)
