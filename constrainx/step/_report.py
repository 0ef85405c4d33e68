"""How constraints fared in a step: the state that every method keeps, and what to read in it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from constrainx.constraints import Composed


class Report(NamedTuple):
    """How one constraint fares in one step; scalars.

    Attributes:
        violation: the root mean square of its rows before the step. A constraint that does not act
            at this step keeps the violation of the last step at which it acted or was measured; it
            is NaN before the first such step.
        met: whether that is within its tolerance.
        resolved: whether the step does to first order what the constraint asks for, less what its
            damping lets it keep, as exactly as the solver's tolerance promises. If not, another
            constraint contradicts it, or the solver did not converge.
        active: whether it acted in this step.
        iterations: of the least-squares solver.
        converged: whether the solver did.
    """

    violation: Float[Array, ""]
    met: Bool[Array, ""]
    resolved: Bool[Array, ""]
    active: Bool[Array, ""]
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]


class ConstraintState(NamedTuple):
    """What every method keeps from step to step.

    Attributes:
        step: how many steps have been taken.
        reports: how each constraint fared in the last one, by name.
        multipliers: what else the method remembers: the Lagrangian's multipliers by constraint, any
            pytree for a method of your own, empty for most.
        removed: the share of the gradient's squared norm that the last step projected out, or of
            the update's where updates alone are projected; zero for a method that does not project.
        trusted: the part of the last update's length that a trust region left, see `NullSpace`; one
            where it did not act. The reports are about the update before it was shortened.
    """

    step: Int[Array, ""]
    reports: dict[str, Report]
    multipliers: PyTree = ()
    removed: Float[Array, ""] | float = 0.0
    trusted: Float[Array, ""] | float = 1.0


class ConstrainedState(NamedTuple):
    """The optimizer's state, and that of the constraints."""

    optimizer: optax.OptState
    constraints: ConstraintState


def initial_state(constraints: Composed, multipliers: PyTree = ()) -> ConstraintState:
    """The state before the first step."""
    yes, zero = jnp.ones((), bool), jnp.zeros((), jnp.int32)
    # Without a dtype it would be weakly typed, unlike that of a step, which would compile twice.
    unknown = jnp.full((), jnp.nan, jnp.result_type(float))
    report = Report(unknown, ~yes, yes, ~yes, zero, yes)
    # A copy for each, so that buffers can be donated.
    reports = {name: jax.tree.map(jnp.copy, report) for name in constraints.names}
    return ConstraintState(zero, reports, multipliers, jnp.zeros(()), jnp.ones(()))


def reports(state: PyTree) -> dict[str, Report]:
    """Finds the constraints' reports of the last step anywhere in an optimizer's state.

    Where several transformations have a constraint of the same name, the later ones are numbered.
    """
    found: dict[str, Report] = {}

    def is_state(node: Any) -> bool:
        return isinstance(node, ConstraintState)

    for node in jax.tree.leaves(nnx.as_pure(state), is_leaf=is_state):
        for name, report in node.reports.items() if is_state(node) else ():
            number, unique = 1, name
            while unique in found:
                number += 1
                unique = f"{name}-{number}"
            found[unique] = report
    return found


def contradictions(state: PyTree) -> list[str]:
    """Names, in sentences, the constraints that the last step could not satisfy together.

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
