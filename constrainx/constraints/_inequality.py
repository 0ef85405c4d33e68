"""Inequalities: what must not exceed a bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
from jaxtyping import Array, Float, PyTree

from constrainx.constraints._constraint import Constraint
from constrainx.constraints._numbers import as_number
from constrainx.constraints.reductions import check_residual


@dataclasses.dataclass(frozen=True)
class AtMost(Constraint):
    """g(model) ≤ bound.

    Acts only on rows that are violated, or would be after the step; elsewhere training is as it
    would be without. The active rows are those of the quadratic program that the step solves, so
    the boundary is left again when the loss pulls inward. What ``reduce`` makes of it:

    - "none": g ≤ bound for each entry.
    - "mean": mean(g) ≤ bound, the mean over the batch; single examples may exceed the bound.
    - "norm", `Norm` and "rms": g ≤ bound for each entry, with the root mean square of
      max(g − bound, 0) over an example, a group of examples or all of them as the row. Such a row
      is zero, with no gradient, wherever the inequality holds, so that it acts once the bound is
      exceeded and not before. Training then hovers about the bound by the length of a step, and
      ends near the constrained optimum; only the rows of "none" and "mean" end at it.
    - `Sketch` is refused: combinations with random signs do not tell g ≤ bound from g ≥ bound.

    Attributes:
        bound: the largest value allowed.
        of: (model, batch, key) ↦ any pytree of arrays, such as an adversarial loss.
    """

    kind: ClassVar[Literal["equality", "inequality"]] = "inequality"

    bound: float
    of: Callable[[Any, Any, Array], PyTree[Float[Array, ...]]]
    gamma: float | Callable[[Any], Any] = dataclasses.field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        bound = as_number(self.bound, argument="AtMost(bound=...)")
        object.__setattr__(self, "bound", bound)

    def residual(self, model: Any, batch: Any, *, key: Array) -> PyTree[Float[Array, ...]]:
        """Returns g − bound, which is positive where the bound is exceeded."""
        values = self.of(model, batch, key)
        # Before the subtraction, which would turn integers into floating-point numbers.
        check_residual(values, owner=self.label)
        return jax.tree.map(lambda leaf: leaf - self.bound, values)
