"""The protocol of a method: how an optimizer is made to respect constraints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from constrainx.constraints import Composed, Member
from constrainx.step._report import Report

# Gradients ↦ the optimizer's update and its new state.
Optimize: TypeAlias = Callable[[PyTree], tuple[PyTree, optax.OptState]]


class Point(NamedTuple):
    """Where a step is taken: the constraints, and all that their rows depend on.

    Attributes:
        constraints: what must hold.
        parameters: before the step.
        step: how many steps have been taken.
        batch: the training batch, or None.
        key: for constraints that draw samples.
        model: the model with its current state, or None if the constraints hold their own.
        measure: whether to evaluate constraints that do not act at this step, too.
    """

    constraints: Composed
    parameters: PyTree
    step: Int[Array, ""]
    batch: Any
    key: Array
    model: Any
    measure: Bool[Array, ""] | bool = True

    def rows(self, parameters: PyTree) -> dict[str, Float[Array, " rows"]]:
        """The rows of all constraints by name, for other parameters at this point.

        Their derivative is with respect to what each constraint may move. The rows of a constraint
        that neither acts at this step nor is to be measured are zero, without evaluating it.
        """
        keys = self.constraints.keys(self.key)
        return {
            member.name: self.evaluate(member, member.hold(parameters), key)
            for member, key in zip(self.constraints, keys, strict=True)
        }

    def evaluate(self, member: Member, parameters: PyTree, key: Array) -> Float[Array, " rows"]:
        """The rows of one constraint, or zeros if nobody needs them at this step."""

        def find(parameters: PyTree) -> Float[Array, " rows"]:
            return member.rows(parameters, self.batch, key, self.model)

        needed = self.needs(member)
        if needed is None:
            return find(parameters)
        shape = jax.eval_shape(find, parameters)
        return jax.lax.cond(needed, find, lambda _: jnp.zeros(shape.shape, shape.dtype), parameters)

    def needs(self, member: Member) -> Bool[Array, ""] | None:
        """Whether a constraint acts at this step or is to be measured; None if that is certain."""
        if member.acts_always or self.measure is True:
            return None
        return member.acts_at(self.step) | self.measure


class Taken(NamedTuple):
    """A step that a method has taken.

    Attributes:
        update: what to add to the parameters.
        optimizer: the new state of the optimizer.
        reports: how the constraints fared, by name.
        multipliers: what the method remembers from now on.
        removed: the share of the gradient's squared norm that was projected out before it went
            into the optimizer, or of the update's if updates alone are projected; zero for a method
            that does no such thing.
        trusted: the part of the update's length that a trust region left; one where it did not act.
    """

    update: PyTree
    optimizer: optax.OptState
    reports: dict[str, Report]
    multipliers: PyTree = ()
    removed: Float[Array, ""] | float = 0.0
    trusted: Float[Array, ""] | float = 1.0


@runtime_checkable
class Method(Protocol):
    """How an optimizer is made to respect constraints; write these two methods for your own.

    A method decides what gradient goes into the optimizer and what update comes out. It may call
    ``optimize`` as often as it likes; the state that it returns is the one that counts. Both of its
    functions are traced by `jax.jit`. A third, ``check(constraints)``, is optional: it is called
    when the optimizer is built, to raise an error for constraints that the method cannot respect.

    >>> import dataclasses, jax, jax.numpy as jnp, optax, constrainx as cx
    >>> from constrainx.step import Point, Taken, report_rows
    >>> @dataclasses.dataclass(frozen=True)
    ... class Barrier:
    ...     '''Adds the gradient of −w Σ log(−c) for inequalities c < 0.'''
    ...     weight: float
    ...     def init(self, constraints, parameters):
    ...         return ()
    ...     def take(self, point, gradients, optimize, multipliers):
    ...         def barrier(p):
    ...             return -self.weight * sum(jnp.sum(jnp.log(-c)) for c in point.rows(p).values())
    ...         extra = jax.grad(barrier)(point.parameters)
    ...         update, state = optimize(jax.tree.map(jnp.add, gradients, extra))
    ...         return Taken(update, state, report_rows(point, point.rows(point.parameters)))
    >>> inside = cx.compose(lambda p: jnp.sum(p**2) - 1.0)
    >>> optimizer = cx.constrain(optax.sgd(0.1), inside, method=Barrier(0.1))
    >>> p = jnp.array([0.5, 0.0])
    >>> update, _ = optimizer.update(jnp.array([-1.0, 0.0]), optimizer.init(p), p)
    >>> print(update.round(3) + 0.0)
    [0.087 0.   ]
    """

    def init(self, constraints: Composed, parameters: PyTree) -> PyTree:
        """What the method remembers before the first step; ``()`` for nothing."""
        ...

    def take(
        self, point: Point, gradients: PyTree, optimize: Optimize, multipliers: PyTree
    ) -> Taken:
        """One step.

        Args:
            point: where, with ``point.rows(parameters)`` for the constraints. The rows of one that
                does not act at ``point.step`` are zero, unless it is to be measured.
            gradients: of the loss.
            optimize: gradients ↦ the optimizer's update and its new state.
            multipliers: what the method remembered.
        """
        ...


def measure_excess(member: Member, rows: Float[Array, " rows"]) -> Float[Array, " rows"]:
    """By how much each row is violated: not at all for an inequality that holds."""
    return jnp.maximum(rows, 0) if member.kind == "inequality" else rows


def average(rows: Float[Array, " rows"]) -> Float[Array, ""]:
    """The mean of rows, and zero if there are none."""
    return jnp.sum(rows) / max(rows.size, 1)


def report_rows(point: Point, rows: dict[str, Float[Array, " rows"]]) -> dict[str, Report]:
    """The reports of a method that solves nothing: each violation, and whether it is tolerated."""
    yes = jnp.ones((), bool)
    reports = {}
    for member in point.constraints:
        excess = measure_excess(member, rows[member.name])
        violation = jnp.sqrt(jnp.mean(jnp.square(excess)))
        reports[member.name] = Report(
            violation=violation.astype(jnp.float32),
            met=violation <= member.tolerance,
            resolved=yes,
            active=member.acts_at(point.step),
            iterations=jnp.zeros((), jnp.int32),
            converged=yes,
        )
    return jax.lax.stop_gradient(reports)
