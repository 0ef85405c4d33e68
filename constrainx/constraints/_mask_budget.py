"""A budget of non-zero weights, on learnable masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from constrainx.constraints import masks
from constrainx.constraints._constraint import Constraint
from constrainx.constraints._numbers import as_number
from constrainx.errors import ArgumentError, check_choice

Per: TypeAlias = Literal["model", "layer", "group"]
# A schedule ends long before this step.
LAST_STEP = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True)
class MaskBudget(Constraint):
    """Mean(p) = target over mask probabilities: the expected density. Exact; a closed form.

    One row for the whole model, in which every masked weight counts the same; or one for each
    layer; or one for each group of a pattern such as 2:4. Moves only the probabilities, and costs
    two passes over them. For a model with masks, from `cx.masks.add_masks`; attached to a part of
    the model, it is a budget for that part.

    The probability is the stored parameter clipped to [0, 1]. The row's derivative is the same for
    each parameter that can still move mean(p) towards the target, p > 0 where the density is too
    high and p < 1 where it is too low, and zero for the others. So a parameter beyond the far end
    of [0, 1] is brought back, one beyond the near end is not pushed further out, and the derivative
    never vanishes. (Counting all parameters alike, or not clipping, lets those outside of [0, 1]
    balance those inside: on a sparse MLP the density then settled at 0.101 or 0.127 for a target of
    0.1, against 0.1000.)

    >>> import optax, constrainx as cx
    >>> cx.MaskBudget(0.1)  # doctest: +ELLIPSIS
    MaskBudget(...target=0.1...)
    >>> gradual = cx.MaskBudget(optax.linear_schedule(1.0, 0.1, 500), per="layer")

    Attributes:
        target: the density to reach, above 0 and at most 1; or an Optax schedule of it, whose last
            value counts outside of training.
        per: whether the budget is one for the "model", or one for each "layer", or one for each
            "group" of the masks' pattern.
        where: an NNX filter on path and mask: the masks that share this budget; all by default. For
            budgets of several groups of layers, give each its own.
    """

    target: float | Callable[[Any], Any]
    per: Per = "model"
    where: Any = dataclasses.field(default=..., kw_only=True)
    wrt: Any = dataclasses.field(default=masks.MaskProbability, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("per", self.per, get_args(Per), owner="MaskBudget")
        if self.where is not ... and self.wrt is masks.MaskProbability:
            object.__setattr__(self, "wrt", nnx.All(masks.MaskProbability, self.where))
        if callable(self.target):
            return
        target = as_number(self.target, argument="MaskBudget(target=...)")
        if not 0 < target <= 1:
            raise ArgumentError(
                "`MaskBudget(target=...)` is the fraction of weights to keep, above 0 and at most "
                f"1, got {self.target!r}."
            )
        object.__setattr__(self, "target", target)

    def residual(
        self,
        model: Any,
        batch: Any,  # noqa: ARG002
        *,
        key: Array,  # noqa: ARG002
        step: Int[Array, ""] | None = None,
    ) -> PyTree[Float[Array, ...]]:
        """Returns mean(p) − target for the model, for each layer, or for each group."""
        excesses = [share.excess for share in self._shares(model, step)]
        return excesses[0] if self.per == "model" else excesses

    def nearest(self, model: Any, step: Int[Array, ""] | None = None) -> None:
        """Shifts the probabilities that can move so that, to first order, the budget is met."""
        for share in self._shares(model, step):
            # |movable| probabilities make up for the excess of all.
            shift = share.excess / share.moving
            for variable, is_movable in zip(share.variables, share.movable, strict=True):
                p = share.view(variable[...])
                moved = p - jnp.where(is_movable, shift, 0)
                variable.set_value(moved.reshape(variable.shape).astype(variable.dtype))

    def violation(self, model: Any, batch: Any, key: Array) -> Float[Array, ""]:  # noqa: ARG002
        """Returns the largest |mean(p) − target|, for the target in the end."""
        return jnp.max(jnp.stack([jnp.max(jnp.abs(s.excess)) for s in self._shares(model, None)]))

    def target_at(self, step: Int[Array, ""] | None) -> Float[Array, ""] | float:
        """The density to have after a step, or in the end if the step is None."""
        if not callable(self.target):
            return self.target
        return jnp.asarray(self.target(LAST_STEP if step is None else step + 1), float)

    def _shares(self, model: Any, step: Int[Array, ""] | None) -> list[_Share]:
        """What has a row of its own."""
        matches = nnx.filterlib.to_predicate(self.where)
        found = [
            variable
            for path, variable in masks.find_probabilities(model)
            if matches(path, variable)
        ]
        if not found:
            raise ArgumentError(
                f"`MaskBudget(where=...)` selects no mask of this {type(model).__name__}."
            )
        target = self.target_at(step)
        if self.per == "group":
            return [_share_of_groups(variable, target) for variable in found]
        parts = [found] if self.per == "model" else [[variable] for variable in found]
        return [_share_of_whole(part, target) for part in parts]


@dataclasses.dataclass(frozen=True)
class _Share:
    """Masks with a common budget, or one array of masks with a budget for each group.

    Attributes:
        variables: the masks.
        view: how to look at their probabilities.
        excess: mean(p) − target, with the derivative of the parameters that can move.
        movable: which of them can.
        moving: the fraction that can.
    """

    variables: list[masks.MaskProbability]
    view: Callable[[Array], Array]
    excess: Float[Array, ...]
    movable: list[Array]
    moving: Float[Array, ...]


def _share_of_whole(variables: list[masks.MaskProbability], target: Any) -> _Share:
    values = [variable[...] for variable in variables]
    size = sum(value.size for value in values)

    def total(arrays: list[Array]) -> Float[Array, ""]:
        return jnp.stack([jnp.sum(array) for array in arrays]).sum() / size

    density = total([jnp.clip(value, 0, 1) for value in values])
    return _make_share(variables, values, lambda a: a, total, density, target)


def _share_of_groups(variable: masks.MaskProbability, target: Any) -> _Share:
    pattern = variable.pattern
    if pattern is None:
        raise ArgumentError(
            '`MaskBudget(per="group")` needs masks with a pattern: `add_masks(pattern="2:4")`.'
        )

    def view(array: Array) -> Array:
        return masks.split_groups(array, pattern.group)

    def total(arrays: list[Array]) -> Float[Array, ...]:
        return jnp.mean(arrays[0], axis=-2, keepdims=True)

    value = view(variable[...])
    density = total([jnp.clip(value, 0, 1)])
    return _make_share([variable], [value], view, total, density, target)


def _make_share(
    variables: list[masks.MaskProbability],
    values: list[Array],
    view: Callable[[Array], Array],
    total: Callable[[list[Array]], Array],
    density: Array,
    target: Any,
) -> _Share:
    is_high = jax.lax.stop_gradient(density - target) >= 0
    movable = [jnp.where(is_high, value > 0, value < 1) for value in values]
    surrogate = total([jnp.where(m, v, 0) for m, v in zip(movable, values, strict=True)])
    return _Share(
        variables=variables,
        view=view,
        excess=masks.straight_through(density - target, surrogate),
        movable=movable,
        moving=total([m.astype(v.dtype) for m, v in zip(movable, values, strict=True)]),
    )
