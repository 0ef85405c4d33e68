"""Inequalities: what must not exceed a bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from constrainx.constraints._constraint import Constraint
from constrainx.constraints._reduce import flatten


@dataclasses.dataclass(frozen=True)
class AtMost(Constraint):
    """g(model) ≤ bound, entry by entry.

    Acts only on rows that are violated, or would be after the step; elsewhere training is as it
    would be without. The active rows are those of the quadratic program that the step solves, so
    the boundary is left again when the loss pulls inward.

    Attributes:
        bound: the largest value allowed.
        of: (model, batch, key) ↦ any pytree of arrays, such as an adversarial loss.
    """

    kind: ClassVar[Literal["equality", "inequality"]] = "inequality"

    bound: float
    of: Callable[[Any, Any, Array], PyTree[Float[Array, ...]]]
    gamma: float | Callable[[Any], Any] = dataclasses.field(default=1.0, kw_only=True)

    def residual(self, model: Any, batch: Any, *, key: Array) -> PyTree[Float[Array, ...]]:
        """G − bound: positive where violated."""
        return jax.tree.map(lambda leaf: leaf - self.bound, self.of(model, batch, key))

    def violation(self, model: Any, batch: Any, key: Array) -> Float[Array, ""]:
        """The root mean square of what exceeds the bound."""
        excess = jnp.maximum(flatten(self.residual(model, batch, key=key)), 0)
        return jnp.sqrt(jnp.mean(jnp.square(excess)))
