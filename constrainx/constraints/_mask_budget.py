"""A budget of non-zero weights, on learnable masks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from constrainx.constraints import masks
from constrainx.constraints._constraint import Constraint
from constrainx.constraints._numbers import as_number
from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class MaskBudget(Constraint):
    """Mean(p) = target over all mask probabilities: the expected density. Exact; one row.

    Every masked weight counts the same, whichever layer it is in. Moves only the probabilities, and
    costs one pass over them. For a model with masks, from `cx.masks.add_masks`; attached to a part
    of the model, it is a budget for that part.

    The probability is the stored parameter clipped to [0, 1]. The row's derivative is 1/N for each
    parameter that can still move mean(p) towards the target, p > 0 where the density is too high
    and p < 1 where it is too low, and zero for the others. So a parameter beyond the far end of
    [0, 1] is brought back, one beyond the near end is not pushed further out, and the derivative
    never vanishes. (Counting all parameters alike, or not clipping, lets those outside of [0, 1]
    balance those inside: on a sparse MLP the density then settled at 0.101 or 0.127 for a target of
    0.1, against 0.1000.)

    Attributes:
        target: the density to reach, above 0 and at most 1.
    """

    target: float
    wrt: Any = dataclasses.field(default=masks.MaskProbability, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        target = as_number(self.target, argument="MaskBudget(target=...)")
        if not 0 < target <= 1:
            raise ArgumentError(
                "`MaskBudget(target=...)` is the fraction of weights to keep, above 0 and at most "
                f"1, got {self.target!r}."
            )
        object.__setattr__(self, "target", target)

    def residual(self, model: Any, batch: Any, *, key: Array) -> Float[Array, ""]:  # noqa: ARG002
        """Returns mean(p) − target."""
        excess = masks.expected_density(model) - self.target
        parameters = masks.probabilities(model)
        movable = [p * jnp.where(excess >= 0, p > 0, p < 1) for p in parameters]
        size = sum(p.size for p in parameters)
        return masks.straight_through(excess, sum(map(jnp.sum, movable)) / size)

    def violation(self, model: Any, batch: Any, key: Array) -> Float[Array, ""]:  # noqa: ARG002
        """Returns |mean(p) − target|."""
        return jnp.abs(masks.expected_density(model) - self.target)
