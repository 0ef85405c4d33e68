"""Constraints that know their nearest point, and need neither Jacobian nor solver.

Where the set of a constraint is affine, with Π(θ) its point nearest to θ and P the derivative of Π,

    u' = P u − γ (θ − Π(θ))

is the vector nearest to u with θ + u' on the set, to the fraction γ.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from constrainx.constraints import Composed, Member, Placement
from constrainx.linalg import norm
from constrainx.step._method import Point
from constrainx.step._report import Report
from constrainx.step._rows import STAGES, Stage


def split_closed_forms(point: Point) -> tuple[tuple[Member, ...], Composed]:
    """The constraints that can be corrected by themselves, and all others.

    One whose parameters another constraint may move as well is not corrected by itself, because
    each would undo some of what the other did. A soft constraint has no nearest point.
    """
    members = list(point.constraints)
    moved = [_list_movable(member, point.parameters) for member in members]
    alone = tuple(
        member
        for i, member in enumerate(members)
        if member.nearest is not None
        and not member.is_soft
        and not any(moved[i] & moved[j] for j in range(len(members)) if j != i)
    )
    return alone, Composed(tuple(member for member in members if member not in alone))


@dataclasses.dataclass(frozen=True)
class ClosedForm:
    """One such constraint at a point.

    Attributes:
        member: the constraint.
        point: where.
        placement: where it is projected.
    """

    member: Member
    point: Point
    placement: Placement

    def correct(self, vector: PyTree, stage: Stage) -> PyTree:
        """A descent direction or an update that obeys the constraint, if this is its stage."""
        if stage not in STAGES[self.placement]:
            return vector
        leaves = jax.tree.leaves(self.point.parameters)
        given, structure = jax.tree.flatten(vector)
        # The others are not handed through the condition below, which would copy them.
        moved = [given[i].astype(leaves[i].dtype) for i in self._movable]
        if self.member.acts_always:
            moved = self._correct(moved, stage)
        else:
            acts = self.member.acts_at(self.point.step)
            moved = jax.lax.cond(acts, lambda v: self._correct(v, stage), lambda v: v, moved)
        for index, leaf in zip(self._movable, moved, strict=True):
            given[index] = leaf
        return jax.tree.unflatten(structure, given)

    def _correct(self, vector: list[Array], stage: Stage) -> list[Array]:
        member, point = self.member, self.point
        leaves = jax.tree.leaves(point.parameters)
        parameters = [leaves[i] for i in self._movable]
        nearest, inside = jax.jvp(self._find_nearest, (parameters,), (vector,))
        gamma = member.gamma_at(point.step)
        if stage == "gradient" and self.placement == "twice":
            gamma = jnp.zeros_like(gamma)  # the update has the pull

        def pull(v: Array, p: Array, n: Array) -> Array:
            return (v - gamma * (p - n)).astype(v.dtype)

        return jax.tree.map(pull, inside, parameters, nearest)

    def report(self) -> Report:
        """How the constraint fares: its step is exact."""
        yes = jnp.ones((), bool)
        needed, find = self.point.needs(self.member), self._measure_violation
        shape = jax.eval_shape(find)
        violation = (
            find()
            if needed is None
            else jax.lax.cond(needed, find, lambda: jnp.zeros(shape.shape, shape.dtype))
        )
        return Report(
            violation=violation,
            met=violation <= self.member.tolerance,
            resolved=jnp.isfinite(violation),
            active=self.member.acts_at(self.point.step),
            iterations=jnp.zeros((), jnp.int32),
            converged=yes,
        )

    @property
    def _movable(self) -> list[int]:
        return sorted(_list_movable(self.member, self.point.parameters))

    def _find_nearest(self, movable: list[Array]) -> list[Array]:
        assert self.member.nearest is not None  # by `split_closed_forms`
        leaves, structure = jax.tree.flatten(self.point.parameters)
        for index, leaf in zip(self._movable, movable, strict=True):
            leaves[index] = leaf
        found = self.member.nearest(jax.tree.unflatten(structure, leaves), self.point.model)
        nearest = jax.tree.leaves(found)
        return [nearest[i] for i in self._movable]

    def _measure_violation(self) -> Float[Array, ""]:
        """The root mean square of the rows."""
        point = self.point
        rows = self.member.rows(point.parameters, point.batch, point.key, point.model)
        return norm(rows) / jnp.sqrt(rows.size)


def _list_movable(member: Member, parameters: PyTree) -> set[int]:
    count = len(jax.tree.leaves(parameters))
    flags = (True,) * count if member.movable is None else member.movable(parameters)
    return {index for index, moves in enumerate(flags) if moves}
