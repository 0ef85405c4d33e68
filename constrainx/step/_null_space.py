"""The null-space step as a method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from constrainx.constraints import Composed, Member, Placement, as_number
from constrainx.errors import ArgumentError, check_choice
from constrainx.linalg import dot
from constrainx.step._closed_form import ClosedForm, split_closed_forms
from constrainx.step._linearise import (
    SolverChoice,
    Traced,
    any_acts,
    check_solver,
    linearise,
    place_rows,
    trace_members,
)
from constrainx.step._method import Optimize, Point, Taken
from constrainx.step._project import correct_stage, report_corrections
from constrainx.step._rows import STAGES, Layout, Stage, check_overshoot
from constrainx.step._system import Correction
from constrainx.step._trust import as_trust, shorten

Metric: TypeAlias = Literal["identity", "optimizer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NullSpace:
    """Moves in the null space of the constraints' Jacobian J, and pulls the constraints to zero.

    Where a constraint is projected is its own choice, see `Constraint`, unless ``placement`` says
    otherwise for all of them:

    - "gradient": g ← g − J⁺(J g − γ c) goes into the optimizer, as in the paper. It comes to rest
      at the constrained optimum, but on the way an optimizer that scales by coordinate, such as
      Adam, leaves the null space again. The learning rate multiplies γ, which may be any number of
      at least 0.
    - "update": u ← u − J⁺(J u + γ c) comes out of the optimizer, and J u = −γ c holds exactly. It
      comes to rest where c = 0 and the optimizer's own update lies in the span of the rows. For
      gradient descent, with or without momentum, that is the constrained optimum; for Adam and
      others that scale by coordinate it is another point. Here γ is at most 2, beyond which each
      step would overshoot by more than it corrects.
    - "twice": g ← g − J⁺J g goes in, u ← u − J⁺(J u + γ c) comes out, with one Jacobian for both.
      J u = −γ c holds exactly, it comes to rest at the constrained optimum for every optimizer that
      scales by something positive, and γ is again at most 2.

    Attributes:
        placement: overrides that of every constraint; None leaves the choice to them.
        momentum: β, at least 0 and below 1: how much of what the rows changed in the last update is
            proposed again, and projected with the next. Over steps with different rows, as those of
            batches are, this solves for all of them; on soft residuals it is SPRING.
        trust: the largest length ‖u‖ of an update, a number above 0 or an Optax schedule; None for
            any. A longer one is shortened as a whole, so that it stays in the null space and
            takes a smaller γ. `ConstraintState.trusted` is the part of its length that was left.
        metric: "optimizer" projects updates in the metric of an adaptive optimizer, the diagonal
            1/√ν of Adam and the like, instead of the Euclidean one. It implies "update", and is an
            error with an optimizer that does not keep ν for every parameter.
        solver: "auto", "gram", or a least-squares solver such as `LSMR(rtol=1e-4)`.
    """

    placement: Placement | None = None
    metric: Metric = "identity"
    solver: SolverChoice = "auto"
    momentum: float = 0.0
    trust: float | Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        momentum = as_number(self.momentum, argument="NullSpace(momentum=...)", least=0)
        if momentum >= 1:
            raise ArgumentError(
                f"`NullSpace(momentum=...)` must be below 1, got {self.momentum!r}: what rows have "
                "changed once would go on for ever. 0.9 is a common choice."
            )
        object.__setattr__(self, "momentum", momentum)
        if self.trust is not None:
            trust = as_trust(self.trust, argument="NullSpace(trust=...)")
            object.__setattr__(self, "trust", trust)
        check_choice("metric", self.metric, get_args(Metric), owner="NullSpace")
        if self.placement is not None:
            check_choice("placement", self.placement, get_args(Placement), owner="NullSpace")
        check_solver(self.solver)
        if self.metric == "optimizer" and self.placement not in (None, "update"):
            raise ArgumentError(
                '`NullSpace(metric="optimizer")` is a metric for updates, got '
                f"placement={self.placement!r}: leave one of them out."
            )

    def check(self, constraints: Composed) -> None:
        """Raises for a γ that is too large, where the placement is known before tracing."""
        for member in constraints:
            placement = self.choose_placement(member)
            if placement is not None:
                check_overshoot(member, placement)

    def init(self, constraints: Composed, parameters: PyTree) -> PyTree:
        """What the rows changed in the last update: nothing."""
        del constraints
        return jax.tree.map(jnp.zeros_like, parameters) if self.momentum else ()

    def take(
        self, point: Point, gradients: PyTree, optimize: Optimize, multipliers: PyTree
    ) -> Taken:
        """One step, with one Jacobian for both of its stages."""
        taken = self._take_all(point, gradients, optimize, multipliers)
        if self.trust is None:
            return taken
        update, part = shorten(taken.update, self.trust, point.step)
        return taken._replace(update=update, trusted=part)

    def _take_all(
        self, point: Point, gradients: PyTree, optimize: Optimize, multipliers: PyTree
    ) -> Taken:
        """A step of any length."""
        known, others = self._split_closed_forms(point)
        if not known:
            return self._take_rows(point, gradients, optimize, multipliers)
        exist: dict[str, Array] = {}
        shares = {"gradient": jnp.zeros(()), "update": jnp.zeros(())}

        @jax.named_scope("solve")
        def correct(vector: PyTree, stage: Stage, reach: Array | None = None) -> PyTree:
            squared, removed = dot(vector, vector), jnp.zeros(())
            for form in known:
                found = form.correct(vector, stage, reach=reach)
                vector, removed = found.vector, removed + found.removed
                if stage in STAGES[form.placement]:
                    exist[form.member.name] = found.exists
            shares[stage] = _measure_share(removed, squared)
            return vector

        def optimize_and_correct(gradients: PyTree) -> tuple[PyTree, optax.OptState]:
            update, state = optimize(gradients)
            return correct(update, "update"), state

        foresees = any(form.foresees for form in known)
        reach = _measure_reach(gradients, optimize) if foresees else None
        first: Stage = "update"
        if any("gradient" in STAGES[form.placement] for form in known):
            first = "gradient"
            descent = correct(jax.tree.map(jnp.negative, gradients), first, reach)
            gradients = jax.tree.map(jnp.negative, descent)
        taken = self._take_rows(others, gradients, optimize_and_correct, multipliers)
        reports = {form.member.name: form.report(exist[form.member.name]) for form in known}
        left = (1 - shares[first]) * (1 - taken.removed)
        return taken._replace(reports={**reports, **taken.reports}, removed=1 - left)

    def _split_closed_forms(self, point: Point) -> tuple[list[ClosedForm], Point]:
        """The constraints that need no solver, and a point with the others."""
        if self.solver != "auto" or self.metric != "identity":
            return [], point
        found, others = split_closed_forms(point)
        forms = []
        for form in found:
            place = self.choose_placement(form.member) or "twice"
            check_overshoot(form.member, place)
            forms.append(dataclasses.replace(form, placement=place))
        return forms, point._replace(constraints=others) if forms else point

    def _take_rows(
        self, point: Point, gradients: PyTree, optimize: Optimize, remembered: PyTree
    ) -> Taken:
        """A step of constraints that are linearised."""
        if not point.constraints.members:
            return Taken(*optimize(gradients), {}, remembered)
        traced = trace_members(point)
        places = {
            member.name: self.place(member, found)
            for member, found in zip(point.constraints, traced, strict=True)
        }
        for member in point.constraints:
            check_overshoot(member, places[member.name])
        layout = Layout(point.constraints, tuple(found.rows for found in traced), places)
        system = linearise(point, self.solver, layout.counts)
        corrections: dict[Stage, Correction] = {}
        removed = jnp.zeros(())
        if layout.has("gradient"):
            reach = _measure_reach(gradients, optimize) if layout.foresees else None
            found = correct_stage(gradients, point, layout, system, stage="gradient", reach=reach)
            removed = _measure_removed(gradients, found)
            gradients = found.vector
            corrections["gradient"] = found
        own, optimizer = optimize(gradients)
        update = self._add_momentum(own, remembered, point, layout)
        if layout.has("update"):
            metric = None
            if self.metric == "optimizer":
                metric = _find_diagonal(optimizer, point.parameters)
            found = correct_stage(update, point, layout, system, stage="update", metric=metric)
            if not layout.has("gradient"):
                removed = _measure_removed(update, found)
            update = found.vector
            corrections["update"] = found
        reports = report_corrections(layout, corrections)
        if self.momentum:
            remembered = jax.tree.map(
                lambda new, before, old: (new - before).astype(old.dtype), update, own, remembered
            )
        return Taken(update, optimizer, reports, remembered, removed)

    def _add_momentum(
        self, update: PyTree, remembered: PyTree, point: Point, layout: Layout
    ) -> PyTree:
        """Proposes again a part of what rows have changed, at steps at which some act."""
        if not self.momentum:
            return update
        if not layout.has("update"):
            raise ArgumentError(
                f"`NullSpace(momentum={self.momentum:g})` is for updates, but all of "
                f"{', '.join(map(repr, point.constraints.names))} are projected in the gradient, "
                'where the optimizer has its own. Use `placement="update"` or "twice" on one of '
                "them, or leave `momentum` out."
            )
        acts = any_acts(point)
        momentum = self.momentum if acts is None else jnp.where(acts, self.momentum, 0)
        return jax.tree.map(lambda u, r: u + (momentum * r).astype(u.dtype), update, remembered)

    def place(self, member: Member, traced: Traced) -> Placement:
        """Where a constraint is projected."""
        return self.choose_placement(member) or place_rows(member, traced)

    def choose_placement(self, member: Member) -> Placement | None:
        """Where a constraint is projected by the user's choice; None if that was left open."""
        return "update" if self.metric == "optimizer" else self.placement or member.placement


def _measure_removed(before: PyTree, found: Correction) -> Float[Array, ""]:
    """The share of the squared norm that a projection removed.

    Where the pull γ c is a part of the gradient, it adds to what is left. So this is at most the
    share of the gradient in the span of the rows, and equal to it where c is zero.
    """
    return _measure_share(_measure_loss(before, found), dot(before, before))


def _measure_share(removed: Float[Array, ""], squared: Float[Array, ""]) -> Float[Array, ""]:
    share = removed / jnp.where(squared > 0, squared, 1)
    return jax.lax.stop_gradient(jnp.where(squared > 0, jnp.clip(share, 0, 1), 0))


def _measure_loss(before: PyTree, found: Correction) -> Float[Array, ""]:
    """‖v‖² − ‖v'‖², by the rows alone where v' = v − Jᵀλ.

    Reading v' for it would cost another pass over all parameters in each step.
    """
    if found.multipliers is None or not found.rows.movable_alone:
        return dot(before, before) - dot(found.vector, found.vector)
    # 2 λᵀJ v − λᵀJ Jᵀλ
    return jnp.sum(found.multipliers * (found.before + found.after))


def _measure_reach(gradients: PyTree, optimize: Optimize) -> Float[Array, ""]:
    """How long the optimizer's update is, in units of the gradient that goes in."""
    update, _ = optimize(gradients)
    length = _measure_length(gradients)
    tiny = jnp.finfo(length.dtype).tiny
    reach = _measure_length(update) / jnp.maximum(length, tiny)
    return jnp.maximum(reach, jnp.sqrt(tiny))


def _measure_length(vector: PyTree) -> Float[Array, ""]:
    """The norm, with the derivative zero at zero, so that a step there can be differentiated."""
    squared = dot(vector, vector)
    return jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1)), 0)


def _find_diagonal(state: optax.OptState, parameters: PyTree) -> PyTree:
    """1/√ν of an adaptive optimizer, for all parameters."""
    moments = [nu for _, nu in optax.tree_utils.tree_get_all_with_path(state, "nu")]
    structure: Any = jax.tree.structure(parameters)
    nu = next((nu for nu in moments if jax.tree.structure(nu) == structure), None)
    if nu is None:
        kept = "it for some of them only" if moments else "no such second moments"
        raise ArgumentError(
            '`NullSpace(metric="optimizer")` needs ν for every parameter, as Adam keeps it, but '
            f"the optimizer keeps {kept}. Leave `metric` out: the default placement ends at the "
            "same points for any optimizer."
        )
    # Bias correction and ε: the metric's overall scale does not matter, but zero would.
    largest = optax.tree.max(jax.tree.map(jnp.max, nu))
    floor = 1e-8 * jnp.sqrt(largest) + jnp.finfo(jnp.float32).tiny
    return jax.tree.map(lambda n, p: (1 / (jnp.sqrt(n) + floor)).astype(p.dtype), nu, parameters)
