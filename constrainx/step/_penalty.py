"""The quadratic penalty, the null space's oldest rival."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from constrainx.constraints import Composed
from constrainx.errors import ArgumentError
from constrainx.step._method import Optimize, Point, Taken, measure_excess, report_rows


@dataclasses.dataclass(frozen=True)
class Penalty:
    """Adds the gradient of weight/2 ‖c‖² to that of the loss.

    For inequalities, c is what exceeds the bound. It ends where the pull of the loss balances the
    penalty, so c is zero there only for an infinite weight.

    Attributes:
        weight: of the penalty.
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        check_weight(self.weight, owner="Penalty")

    def init(self, constraints: Composed, parameters: PyTree) -> PyTree:
        """Nothing to remember."""
        del constraints, parameters
        return ()

    def take(
        self, point: Point, gradients: PyTree, optimize: Optimize, multipliers: PyTree
    ) -> Taken:
        """One step of the optimizer on loss and penalty."""

        def value(parameters: PyTree) -> tuple[Float[Array, ""], dict[str, Array]]:
            rows = point.rows(parameters)
            acting = [
                jnp.where(member.acts_at(point.step), measure_excess(member, rows[member.name]), 0)
                for member in point.constraints
            ]
            return 0.5 * self.weight * jnp.sum(jnp.square(jnp.concatenate(acting))), rows

        extra, rows = jax.grad(value, has_aux=True)(point.parameters)
        update, optimizer = optimize(jax.tree.map(jnp.add, gradients, extra))
        return Taken(update, optimizer, report_rows(point, rows), multipliers)


def check_weight(weight: float, *, owner: str) -> None:
    """Raises unless the weight is a number that makes sense."""
    if not (0 <= weight < float("inf")):
        raise ArgumentError(
            f"`{owner}(weight=...)` must be a number of at least 0, got {weight!r}."
        )
