"""What a step asks of each row, before the optimizer and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from constrainx.constraints import Composed, Member, Placement
from constrainx.errors import ArgumentError

Stage: TypeAlias = Literal["gradient", "update"]
# In which stages a constraint is projected, by its placement.
STAGES: Mapping[Placement, tuple[Stage, ...]] = {
    "gradient": ("gradient",),
    "update": ("update",),
    "twice": ("gradient", "update"),
}


def check_overshoot(member: Member, placement: Placement) -> None:
    """Raises where γ would make an update overshoot by more than it corrects.

    After an update with J u = −γ c the rows are (1 − γ) c to first order, and grow if γ > 2. Three
    cases are let through: in a gradient, the learning rate multiplies γ; an inequality may
    overshoot, because it holds on the other side; and the values of a schedule are not known yet.
    """
    gamma = member.gamma
    if "update" not in STAGES[placement] or member.kind == "inequality" or callable(gamma):
        return
    if gamma > 2:
        raise ArgumentError(
            f"`gamma={gamma:g}` of constraint {member.name!r} must be at most 2 where updates are "
            f"projected (placement={placement!r}): each step multiplies the violation by 1 − γ = "
            f"{1 - gamma:g}, so it would overshoot by more than it corrects. γ = 1 corrects all of "
            'it; or use `placement="gradient"`, where the learning rate multiplies γ.'
        )


class Rows(NamedTuple):
    """What a stage asks of the rows: J v = target, or J v ≤ target for inequalities.

    Attributes:
        values: c.
        target: see above.
        acts: whether the row takes part in this stage at all.
        inequality: whether it is one.
        movable_alone: whether the parameters that the rows may not move are left out of J v. A
            gradient is projected in the space of what may move; an update must obey as a whole.
        sign: −1 where v is a gradient, of which the step goes the other way: J(−v) = target. The
            sign goes to the few rows, because turning v around would copy it.
        damping: μ of each row, as a part of the mean squared length of its constraint's rows; None
            if all rows are hard.
    """

    values: Float[Array, " rows"]
    target: Float[Array, " rows"]
    acts: Bool[Array, " rows"]
    inequality: Bool[np.ndarray, " rows"]
    movable_alone: bool = False
    sign: int = 1
    damping: Float[Array, " rows"] | None = None


class Layout(NamedTuple):
    """Which rows belong to which constraint, and where each constraint is projected.

    Attributes:
        constraints: in the order of their rows.
        counts: how many rows each has.
        placements: where each is projected, by name.
    """

    constraints: Composed
    counts: tuple[int, ...]
    placements: Mapping[str, Placement]

    def spread(self, per_member: list[Array]) -> Array:
        """A figure for each constraint, as one for each row."""
        return spread(per_member, self.counts)

    def name(self, rows: Array) -> dict[str, Array]:
        """Rows by constraint."""
        ends = [sum(self.counts[: i + 1]) for i in range(len(self.counts))]
        return {
            name: rows[end - count : end]
            for name, count, end in zip(self.constraints.names, self.counts, ends, strict=True)
        }

    def has(self, stage: Stage) -> bool:
        """Whether any row is projected in this stage."""
        return any(stage in STAGES[place] for place in self.placements.values())

    @property
    def foresees(self) -> bool:
        """Whether an inequality is projected twice: then it must be known how far a step goes."""
        return any(
            member.kind == "inequality" and self.placements[member.name] == "twice"
            for member in self.constraints
        )

    def ask(
        self,
        values: Float[Array, " rows"],
        step: Int[Array, ""],
        stage: Stage,
        *,
        reach: Float[Array, ""] | None = None,
    ) -> Rows:
        """What a stage asks of all rows at a step.

        On an update, and on the gradient of rows that are projected there alone, J v = −γ c, and an
        inequality that holds may be used up, J v ≤ −c. The gradient of rows that are projected
        twice loses what lies in their span and has no pull, J v = 0; where an inequality holds, the
        gradient keeps what the step will use up, J v ≤ −c / reach. (If rows took part only at their
        bound, two that meet in a corner would take turns at pushing each other off it.)

        Args:
            values: c.
            step: for schedules.
            stage: before the optimizer or after it.
            reach: how long an update is, in units of its gradient.
        """
        members = list(self.constraints)
        places = [self.placements[member.name] for member in members]
        gamma = self.spread([m.gamma_at(step) for m in members]).astype(values.dtype)
        acts = self.spread(
            [
                m.acts_at(step) & (stage in STAGES[place])
                for m, place in zip(members, places, strict=True)
            ]
        )
        # Known before anything runs, and NumPy's, so that it stays known inside of `jax.jit`.
        inequality = np.repeat([m.is_bounded for m in members], self.counts)
        target = jnp.where(inequality & (values <= 0), -values, -gamma * values)
        if stage == "gradient" and "twice" in places:
            twice = self.spread([jnp.asarray(place == "twice") for place in places])
            room = jnp.zeros_like(values)
            if reach is not None:
                room = jnp.where(inequality, jnp.maximum(-values, 0) / reach, 0)
            target = jnp.where(twice, room, target)
        damping = None
        if any(member.is_soft for member in members):
            damping = self.spread([m.damping_at(step) for m in members]).astype(values.dtype)
        return Rows(
            values,
            target,
            acts,
            inequality,
            movable_alone=stage == "gradient",
            sign=-1 if stage == "gradient" else 1,
            damping=damping,
        )


def spread(figures: Sequence[Array], counts: Sequence[int]) -> Array:
    """A figure for each constraint, as one for each of its rows."""
    return jnp.concatenate(
        [jnp.broadcast_to(figure, (n,)) for figure, n in zip(figures, counts, strict=True)]
    )
