"""Constraints that know their nearest point, and need neither Jacobian nor solver.

Where the set of a constraint is affine, with Π(θ) its point nearest to θ and P the derivative of Π,

    u' = P u − γ (θ − Π(θ))

is the vector nearest to u with θ + u' on the set, to the fraction γ. Other constraints know their
rows well enough to write J⁺ down, or the nearest point of a convex set; see `KnowsItsStep`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from constrainx.constraints import Composed, Member, Placement
from constrainx.linalg import dot, norm
from constrainx.step._method import Point, measure_excess
from constrainx.step._report import Report
from constrainx.step._rows import STAGES, Stage


class Solved(NamedTuple):
    """A vector that was corrected in closed form.

    Attributes:
        vector: v'.
        exists: whether it does all that was asked.
        removed: ‖v‖² − ‖v'‖².
    """

    vector: PyTree
    exists: Bool[Array, ""]
    removed: Float[Array, ""]


def split_closed_forms(point: Point) -> tuple[tuple[ClosedForm, ...], Composed]:
    """The constraints that can be corrected by themselves, and all others.

    One whose parameters another constraint may move as well is not corrected by itself, because
    each would undo some of what the other did. A soft constraint has no nearest point.
    """
    members = list(point.constraints)
    forms = [_find_closed_form(member, point) for member in members]
    moved = [
        _list_movable(member, point.parameters) if form is None else form.moved
        for member, form in zip(members, forms, strict=True)
    ]
    alone = tuple(
        form
        for i, form in enumerate(forms)
        if form is not None and not any(moved[i] & moved[j] for j in range(len(members)) if j != i)
    )
    known = [form.member for form in alone]
    return alone, Composed(tuple(member for member in members if member not in known))


@dataclasses.dataclass(frozen=True)
class ClosedForm:
    """One such constraint at a point.

    Attributes:
        member: the constraint.
        point: where.
        moved: the parameters that it moves, by number.
        placement: where it is projected.
    """

    member: Member
    point: Point
    moved: frozenset[int]
    placement: Placement = "twice"

    @property
    def foresees(self) -> bool:
        """Whether it must be known how far a step goes, as for an inequality projected twice."""
        return self.member.kind == "inequality" and self.placement == "twice"

    def correct(
        self,
        vector: PyTree,
        stage: Stage,
        *,
        reach: Float[Array, ""] | None = None,
    ) -> Solved:
        """A descent direction or an update that obeys the constraint, if this is its stage.

        Args:
            vector: either of them.
            stage: before the optimizer or after it.
            reach: how long an update is, in units of its gradient.
        """
        yes = jnp.ones((), bool)
        if stage not in STAGES[self.placement]:
            return Solved(vector, yes, jnp.zeros(()))
        gamma = self.member.gamma_at(self.point.step)
        if stage == "gradient" and self.placement == "twice":
            gamma *= 0  # the update has the pull; a γ that is not a number stays one
        else:
            reach = None
        leaves = jax.tree.leaves(self.point.parameters)
        given, structure = jax.tree.flatten(vector)
        # The others are not handed through the condition below, which would copy them.
        before = [given[i].astype(leaves[i].dtype) for i in self._numbers]

        def solve(v: list[Array]) -> tuple[list[Array], Array]:
            return self._correct(v, gamma, reach)

        if self.member.acts_always:
            after, exists = solve(before)
        else:
            acts = self.member.acts_at(self.point.step)
            after, exists = jax.lax.cond(acts, solve, lambda v: (v, yes), before)
        for index, leaf in zip(self._numbers, after, strict=True):
            given[index] = leaf
        removed = dot(before, before) - dot(after, after)
        return Solved(jax.tree.unflatten(structure, given), exists, removed)

    def _correct(
        self, vector: list[Array], gamma: Array, reach: Array | None
    ) -> tuple[list[Array], Array]:
        own = self._pick(self.point.parameters)
        known = self.member.on_weights
        if known is None:
            nearest, inside = jax.jvp(self._find_nearest, (own,), (vector,))

            def pull(v: Array, p: Array, n: Array) -> Array:
                return (v - gamma * (p - n)).astype(v.dtype)

            return jax.tree.map(pull, inside, own, nearest), jnp.ones((), bool)
        if reach is None:
            return known.correct(own, vector, gamma, self._put, self.point.model)
        # What a step will use up of the room that is left, and no more.
        longer = [(reach * v).astype(v.dtype) for v in vector]
        found, exists = known.correct(own, longer, gamma, self._put, self.point.model)
        return [(v / reach).astype(v.dtype) for v in found], exists

    def report(self, exists: Bool[Array, ""]) -> Report:
        """How the constraint fares: its step is exact, where there is one.

        Args:
            exists: whether there is a step that does all that was asked.
        """
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
            resolved=jnp.isfinite(violation) & exists,
            active=self.member.acts_at(self.point.step),
            iterations=jnp.zeros((), jnp.int32),
            converged=jnp.ones((), bool),
        )

    @property
    def _numbers(self) -> list[int]:
        return sorted(self.moved)

    def _pick(self, parameters: PyTree) -> list[Array]:
        leaves = jax.tree.leaves(parameters)
        return [leaves[i] for i in self._numbers]

    def _put(self, moved: list[Array]) -> PyTree:
        """All parameters, with these in place of those that the constraint moves."""
        leaves, structure = jax.tree.flatten(self.point.parameters)
        for index, leaf in zip(self._numbers, moved, strict=True):
            leaves[index] = leaf
        return jax.tree.unflatten(structure, leaves)

    def _find_nearest(self, moved: list[Array]) -> list[Array]:
        assert self.member.nearest is not None  # by `_find_closed_form`
        return self._pick(self.member.nearest(self._put(moved), self.point.model))

    def _measure_violation(self) -> Float[Array, ""]:
        """The root mean square of the rows."""
        point = self.point
        rows = self.member.rows(point.parameters, point.batch, point.key, point.model)
        return norm(measure_excess(self.member, rows)) / jnp.sqrt(rows.size)


def _find_closed_form(member: Member, point: Point) -> ClosedForm | None:
    """The closed form of a constraint by itself, if it has one at this point."""
    if member.is_soft:
        return None
    movable = _list_movable(member, point.parameters)
    if member.nearest is not None:
        return ClosedForm(member, point, frozenset(movable))
    if member.on_weights is None:
        return None
    selected = member.on_weights.find_leaves(point.parameters, point.model)
    # What is selected but must stay would need other rows.
    if selected is None or not movable.issuperset(selected):
        return None
    return ClosedForm(member, point, frozenset(selected))


def _list_movable(member: Member, parameters: PyTree) -> set[int]:
    count = len(jax.tree.leaves(parameters))
    flags = (True,) * count if member.movable is None else member.movable(parameters)
    return {index for index, moves in enumerate(flags) if moves}
