"""The quadratic penalty, on the same constraints."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from constrainx.constraints import Composed, as_number
from constrainx.step._method import Optimize, Point, Taken, average, measure_excess, report_rows


@dataclasses.dataclass(frozen=True)
class Penalty:
    """Adds a quadratic penalty to the loss, by way of its gradient.

    For constraints j with rows c_j, what is minimised is

        f + weight/2 Σ_j mean(c_j²),

    so that a weight means the same for one row and for a thousand. For inequalities, c is what
    exceeds the bound. It ends where the pull of the loss balances the penalty, so c is zero there
    only for an infinite weight.

    Attributes:
        weight: of the penalty, a finite number of at least 0.
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        weight = as_number(self.weight, argument="Penalty(weight=...)", least=0)
        object.__setattr__(self, "weight", weight)

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
            total = jnp.zeros(())
            for member in point.constraints:
                excess = measure_excess(member, rows[member.name])
                acting = jnp.where(member.acts_at(point.step), excess, 0)
                total += 0.5 * self.weight * average(jnp.square(acting))
            return total, rows

        extra, rows = jax.grad(value, has_aux=True)(point.parameters)
        update, optimizer = optimize(jax.tree.map(jnp.add, gradients, extra))
        return Taken(update, optimizer, report_rows(point, rows), multipliers)
