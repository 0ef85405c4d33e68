"""How constraints fared: the state that every method keeps, and what to read in it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from constrainx.constraints import Composed
from constrainx.step._project import Report


class NullspaceState(NamedTuple):
    """The count of steps, and how each constraint fared in the last one."""

    step: Int[Array, ""]
    reports: dict[str, Report]


class LagrangianState(NamedTuple):
    """The same, and the multipliers by constraint."""

    step: Int[Array, ""]
    reports: dict[str, Report]
    multipliers: dict[str, Float[Array, " rows"]]


def reports(state: PyTree) -> dict[str, Report]:
    """The constraints' reports of the last step, found anywhere in an optimizer's state."""
    found: dict[str, Report] = {}

    def is_state(node: Any) -> bool:
        return isinstance(node, NullspaceState | LagrangianState)

    for node in jax.tree.leaves(nnx.as_pure(state), is_leaf=is_state):
        if is_state(node):
            found.update(node.reports)
    return found


def contradictions(state: PyTree) -> list[str]:
    """Sentences that name the constraints which the last step could not satisfy together.

    Reads values, so call it outside of `jax.jit`.
    """
    unresolved = [name for name, report in reports(state).items() if not bool(report.resolved)]
    if not unresolved:
        return []
    names = ", ".join(repr(name) for name in unresolved)
    if len(unresolved) == 1:
        return [
            f"constraint {names} was not resolved by the step: its rows contradict each other, or "
            "the solver did not converge"
        ]
    return [f"constraints {names} contradict each other: no step satisfies them all"]


def initial_state(constraints: Composed) -> NullspaceState:
    """No step taken yet."""
    yes, zero = jnp.ones((), bool), jnp.zeros((), jnp.int32)
    report = Report(jnp.full((), jnp.nan), ~yes, yes, ~yes, zero, yes)
    # A copy for each, so that buffers can be donated.
    return NullspaceState(
        zero, {name: jax.tree.map(jnp.copy, report) for name in constraints.names}
    )
