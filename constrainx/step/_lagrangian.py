"""The augmented Lagrangian, on the same constraints."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from constrainx.constraints import Composed, Member
from constrainx.step._method import Optimize, Point, Taken, report_rows
from constrainx.step._penalty import check_weight


@dataclasses.dataclass(frozen=True)
class Lagrangian:
    """Adds the gradient of λᵀc + weight/2 ‖c‖², and moves λ by weight · c after each step.

    There is a multiplier for each row where the rows are known at the start, that is for functions
    of the parameters alone. Rows that come from a batch are other rows in the next step; all rows
    of such a constraint share one multiplier.

    Attributes:
        weight: of the quadratic term, and the step size of the multipliers.
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        check_weight(self.weight, owner="Lagrangian")

    def init(self, constraints: Composed, parameters: PyTree) -> dict[str, Array]:
        """Multipliers at zero, by constraint."""
        return {m.name: jnp.zeros(_shape_at_start(m, parameters)) for m in constraints}

    def take(
        self,
        point: Point,
        gradients: PyTree,
        optimize: Optimize,
        multipliers: dict[str, Array],
    ) -> Taken:
        """One step of the optimizer on the augmented Lagrangian, and one of the multipliers."""
        weight = self.weight

        def value(parameters: PyTree) -> tuple[Float[Array, ""], dict[str, Array]]:
            rows = point.rows(parameters)
            total = jnp.zeros(())
            for member in point.constraints:
                row = jnp.where(member.acts_at(point.step), rows[member.name], 0)
                multiplier = multipliers[member.name]
                if member.kind == "inequality":
                    # The classical form, (max(0, λ + w c)² − λ²) / 2w.
                    shifted = jnp.maximum(multiplier + weight * row, 0)
                    total += jnp.sum(jnp.square(shifted) - jnp.square(multiplier)) / (2 * weight)
                else:
                    total += jnp.sum(multiplier * row) + 0.5 * weight * jnp.sum(jnp.square(row))
            return total, rows

        extra, rows = jax.grad(value, has_aux=True)(point.parameters)
        moved = {}
        for member in point.constraints:
            old = multipliers[member.name]
            row = jnp.where(member.acts_at(point.step), rows[member.name], 0)
            new = old + weight * (row if old.shape == row.shape else jnp.mean(row))
            moved[member.name] = jnp.maximum(new, 0) if member.kind == "inequality" else new
        update, optimizer = optimize(jax.tree.map(jnp.add, gradients, extra))
        return Taken(update, optimizer, report_rows(point, rows), moved)


def _shape_at_start(member: Member, parameters: PyTree) -> tuple[int, ...]:
    try:
        shape = jax.eval_shape(lambda p: member.rows(p, None, jax.random.key(0), None), parameters)
    except Exception:  # whatever a user's residual raises without its batch
        return ()
    return shape.shape
