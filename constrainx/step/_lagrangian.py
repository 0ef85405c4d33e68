"""The augmented Lagrangian, on the same constraints."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from constrainx.constraints import Composed, Member, as_number
from constrainx.step._method import Optimize, Point, Taken, average, report_rows


@dataclasses.dataclass(frozen=True)
class Lagrangian:
    """Descends on the augmented Lagrangian, and moves its multipliers after each step.

    For constraints j with rows c_j and multipliers λ_j, the gradient that goes into the optimizer
    is that of

        f + Σ_j mean(λ_j c_j) + weight/2 mean(c_j²),    and then    λ_j ← λ_j + rate · c_j.

    There is a multiplier for each row where the rows are known at the start, that is for functions
    of the parameters alone. Rows that come from a batch change from step to step; all rows of
    such a constraint share one multiplier, λ_j mean(c_j), which moves by rate · mean(c_j).

    Because these are means, weight and rate mean the same for any number of rows n. The classical
    method of multipliers is rate = weight: written with sums, its weight and its step size are both
    weight/n. Where this comes to rest, ∇f + 1/n Σ_i λ_i ∇c_i = 0. The multipliers of the problem
    min f subject to c = 0, with ∇f + Σ_i μ_i ∇c_i = 0, are therefore μ = λ/n, also for a multiplier
    that is shared. A constraint of one row has μ = λ.

    For inequalities, the row's force λ + weight · c and the new λ are cut off at zero.

    Attributes:
        weight: of the quadratic term, a finite number of at least 0.
        rate: the step size of the multipliers, a finite number of at least 0; None stands for the
            weight.
    """

    weight: float = 1.0
    rate: float | None = None

    def __post_init__(self) -> None:
        weight = as_number(self.weight, argument="Lagrangian(weight=...)", least=0)
        object.__setattr__(self, "weight", weight)
        if self.rate is not None:
            fix = "None stands for the weight."
            rate = as_number(self.rate, argument="Lagrangian(rate=...)", least=0, fix=fix)
            object.__setattr__(self, "rate", rate)

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

        def value(parameters: PyTree) -> tuple[Float[Array, ""], dict[str, Array]]:
            rows = point.rows(parameters)
            total = jnp.zeros(())
            for member in point.constraints:
                row = jnp.where(member.acts_at(point.step), rows[member.name], 0)
                force = _cut(member, multipliers[member.name] + self.weight * row)
                # Its gradient is that of λ c + weight/2 c², and for inequalities that of the
                # classical (max(0, λ + weight c)² − λ²) / 2 weight, without a division by zero.
                total += average(jax.lax.stop_gradient(force) * row)
            return total, rows

        extra, rows = jax.grad(value, has_aux=True)(point.parameters)
        rate = self.weight if self.rate is None else self.rate
        moved = {}
        for member in point.constraints:
            old = multipliers[member.name]
            row = jnp.where(member.acts_at(point.step), rows[member.name], 0)
            step = row if old.shape == row.shape else average(row)
            moved[member.name] = _cut(member, old + rate * step)
        update, optimizer = optimize(jax.tree.map(jnp.add, gradients, extra))
        return Taken(update, optimizer, report_rows(point, rows), moved)


def _cut(member: Member, force: Array) -> Array:
    """The force, cut off at zero for an inequality, which pushes in one direction only."""
    return jnp.maximum(force, 0) if member.kind == "inequality" else force


def _shape_at_start(member: Member, parameters: PyTree) -> tuple[int, ...]:
    try:
        shape = jax.eval_shape(lambda p: member.rows(p, None, jax.random.key(0), None), parameters)
    except Exception:  # whatever a user's residual raises without its batch
        return ()
    return shape.shape
