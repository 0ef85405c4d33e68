"""The classical methods, on the same constraints: quadratic penalty and augmented Lagrangian."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from constrainx.constraints._compose import Composed, Member


class PenaltyState(NamedTuple):
    """The count of steps."""

    step: Int[Array, ""]


class LagrangianState(NamedTuple):
    """The count of steps, and the multipliers by constraint."""

    step: Int[Array, ""]
    multipliers: dict[str, Float[Array, " rows"]]


def penalty(constraints: Composed, weight: float) -> optax.GradientTransformationExtraArgs:
    """Adds the gradient of weight/2 ‖c‖²; for inequalities, of what exceeds the bound."""

    def init(params: PyTree) -> PenaltyState:
        del params
        return PenaltyState(jnp.zeros((), jnp.int32))

    def update(
        updates: PyTree, state: PenaltyState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PenaltyState]:
        def value(params: PyTree) -> Float[Array, ""]:
            rows = _rows(constraints, params, state.step, extra)
            return 0.5 * weight * jnp.sum(jnp.square(jnp.concatenate(list(rows.values()))))

        updates = jax.tree.map(jnp.add, updates, jax.grad(value)(params))
        return updates, PenaltyState(state.step + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def lagrangian(constraints: Composed, weight: float) -> optax.GradientTransformationExtraArgs:
    """Adds the gradient of λᵀc + weight/2 ‖c‖², and moves λ by weight · c after each step.

    There is a multiplier for each row where the rows are known at the start, that is for functions
    of the parameters alone. Rows that come from a batch are other rows in the next step; all rows
    of such a constraint share one multiplier.
    """

    def init(params: PyTree) -> LagrangianState:
        return LagrangianState(
            jnp.zeros((), jnp.int32),
            {member.name: jnp.zeros(_rows_at_start(member, params)) for member in constraints},
        )

    def update(
        updates: PyTree, state: LagrangianState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, LagrangianState]:
        def value(params: PyTree) -> tuple[Float[Array, ""], dict[str, Array]]:
            rows = _rows(constraints, params, state.step, extra, clip=False)
            total = jnp.zeros(())
            for member in constraints:
                row, multiplier = rows[member.name], state.multipliers[member.name]
                if member.kind == "inequality":
                    # The classical form, (max(0, λ + w c)² − λ²) / 2w.
                    shifted = jnp.maximum(multiplier + weight * row, 0)
                    total += jnp.sum(jnp.square(shifted) - jnp.square(multiplier)) / (2 * weight)
                else:
                    total += jnp.sum(multiplier * row) + 0.5 * weight * jnp.sum(jnp.square(row))
            return total, rows

        gradients, rows = jax.grad(value, has_aux=True)(params)
        multipliers = {}
        for member in constraints:
            old, row = state.multipliers[member.name], rows[member.name]
            new = old + weight * (row if old.shape == row.shape else jnp.mean(row))
            multipliers[member.name] = jnp.maximum(new, 0) if member.kind == "inequality" else new
        updates = jax.tree.map(jnp.add, updates, gradients)
        return updates, LagrangianState(state.step + 1, multipliers)

    return optax.GradientTransformationExtraArgs(init, update)


def _rows(
    constraints: Composed, params: PyTree, step: Array, extra: dict[str, Any], clip: bool = True
) -> dict[str, Float[Array, " rows"]]:
    """The rows of the constraints that act at this step; zero for the others."""
    key = extra.get("key")
    key = jax.random.fold_in(jax.random.key(0), step) if key is None else key
    rows = constraints(params, extra.get("batch"), key, extra.get("module"))
    result = {}
    for member in constraints:
        row = rows[member.name]
        row = jnp.maximum(row, 0) if clip and member.kind == "inequality" else row
        result[member.name] = jnp.where(member.acts_at(step), row, 0)
    return result


def _rows_at_start(member: Member, params: PyTree) -> tuple[int, ...]:
    try:
        shape = jax.eval_shape(lambda p: member.rows(p, None, jax.random.key(0), None), params)
    except Exception:  # whatever a user's residual raises without its batch
        return ()
    return shape.shape
