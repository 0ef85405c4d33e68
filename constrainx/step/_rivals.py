"""The classical methods, on the same constraints: quadratic penalty and augmented Lagrangian."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from constrainx.constraints import Composed, Member
from constrainx.step._project import Report
from constrainx.step._report import LagrangianState, NullspaceState, initial_state


def penalty(constraints: Composed, weight: float) -> optax.GradientTransformationExtraArgs:
    """Adds the gradient of weight/2 ‖c‖²; for inequalities, of what exceeds the bound."""

    def init(params: PyTree) -> NullspaceState:
        del params
        return initial_state(constraints)

    def update(
        updates: PyTree, state: NullspaceState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, NullspaceState]:
        def value(params: PyTree) -> tuple[Float[Array, ""], dict[str, Array]]:
            rows = _rows(constraints, params, state.step, extra)
            acting = [
                jnp.where(member.acts_at(state.step), _excess(member, rows[member.name]), 0)
                for member in constraints
            ]
            return 0.5 * weight * jnp.sum(jnp.square(jnp.concatenate(acting))), rows

        gradients, rows = jax.grad(value, has_aux=True)(params)
        updates = jax.tree.map(jnp.add, updates, gradients)
        return updates, NullspaceState(state.step + 1, _reports(constraints, rows, state.step))

    return optax.GradientTransformationExtraArgs(init, update)


def lagrangian(constraints: Composed, weight: float) -> optax.GradientTransformationExtraArgs:
    """Adds the gradient of λᵀc + weight/2 ‖c‖², and moves λ by weight · c after each step.

    There is a multiplier for each row where the rows are known at the start, that is for functions
    of the parameters alone. Rows that come from a batch are other rows in the next step; all rows
    of such a constraint share one multiplier.
    """

    def init(params: PyTree) -> LagrangianState:
        return LagrangianState(
            *initial_state(constraints),
            {member.name: jnp.zeros(_rows_at_start(member, params)) for member in constraints},
        )

    def update(
        updates: PyTree, state: LagrangianState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, LagrangianState]:
        def value(params: PyTree) -> tuple[Float[Array, ""], dict[str, Array]]:
            rows = _rows(constraints, params, state.step, extra)
            total = jnp.zeros(())
            for member in constraints:
                row = jnp.where(member.acts_at(state.step), rows[member.name], 0)
                multiplier = state.multipliers[member.name]
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
            old = state.multipliers[member.name]
            row = jnp.where(member.acts_at(state.step), rows[member.name], 0)
            new = old + weight * (row if old.shape == row.shape else jnp.mean(row))
            multipliers[member.name] = jnp.maximum(new, 0) if member.kind == "inequality" else new
        updates = jax.tree.map(jnp.add, updates, gradients)
        reports = _reports(constraints, rows, state.step)
        return updates, LagrangianState(state.step + 1, reports, multipliers)

    return optax.GradientTransformationExtraArgs(init, update)


def _rows(
    constraints: Composed, params: PyTree, step: Array, extra: dict[str, Any]
) -> dict[str, Float[Array, " rows"]]:
    key = extra.get("key")
    key = jax.random.fold_in(jax.random.key(0), step) if key is None else key
    return constraints(params, extra.get("batch"), key, extra.get("module"))


def _excess(member: Member, row: Float[Array, " rows"]) -> Float[Array, " rows"]:
    """What there is of a violation: an inequality that holds has none."""
    return jnp.maximum(row, 0) if member.kind == "inequality" else row


def _reports(constraints: Composed, rows: dict[str, Array], step: Array) -> dict[str, Report]:
    yes = jnp.ones((), bool)
    reports = {}
    for member in constraints:
        violation = jnp.sqrt(jnp.mean(jnp.square(_excess(member, rows[member.name]))))
        reports[member.name] = Report(
            violation=violation.astype(jnp.float32),
            met=violation <= member.tolerance,
            resolved=yes,
            active=member.acts_at(step),
            iterations=jnp.zeros((), jnp.int32),
            converged=yes,
        )
    return reports


def _rows_at_start(member: Member, params: PyTree) -> tuple[int, ...]:
    try:
        shape = jax.eval_shape(lambda p: member.rows(p, None, jax.random.key(0), None), params)
    except Exception:  # whatever a user's residual raises without its batch
        return ()
    return shape.shape
