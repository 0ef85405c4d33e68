"""Small least-squares problems, many at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from constrainx.linalg import Cholesky, Solver, lstsq

# So many rounding errors keep the Gram matrix of rows of unit length definite.
ROUNDINGS = 32


@dataclasses.dataclass(frozen=True)
class Solving:
    """How to solve least-squares problems whose rows are of unit length, or shorter.

    Attributes:
        solver: of `lstsq`. None is a Cholesky factorisation, damped so that rows may depend on each
            other: fast in a batch.
        passes: how often to solve without a solver; each pass takes out what damping has left.
    """

    solver: Solver | None = None
    passes: int = 2

    def find_least_norm(
        self,
        rows: Float[Array, "rows n"],
        right: Float[Array, " rows"],
        *,
        active: Bool[Array, " rows"] | None = None,
    ) -> Float[Array, " n"]:
        """The smallest v with rows @ v = right, or nearest to it, on the active rows or all."""
        total = jnp.zeros(rows.shape[1], rows.dtype)
        if not len(rows):
            return total
        mask = jnp.ones(len(rows), bool) if active is None else active
        rows, right = jnp.where(mask[:, None], rows, 0), jnp.where(mask, right, 0)

        def multiply(pair: tuple[Array, Array]) -> Array:
            # A row that does not count has a variable of its own, so that none is zero.
            v, own = pair
            return jnp.matmul(rows, v, precision="highest") + jnp.where(mask, 0, own)

        for _ in range(self._rounds):
            left = right - jnp.matmul(rows, total, precision="highest")
            step, _ = self._solve(multiply, left, (total, right))
            total = total + step
        return total

    def find_multipliers(
        self,
        rows: Float[Array, "rows n"],
        right: Float[Array, " n"],
        *,
        active: Bool[Array, " rows"] | None = None,
    ) -> Float[Array, " rows"]:
        """The smallest λ with λ @ rows = right, or nearest to it, and zero off the active rows."""
        total = jnp.zeros(len(rows), rows.dtype)
        if not len(rows):
            return total
        mask = jnp.ones(len(rows), bool) if active is None else active
        rows, nothing = jnp.where(mask[:, None], rows, 0), jnp.zeros_like(total)

        def multiply(multipliers: Array) -> tuple[Array, Array]:
            pulled = jnp.matmul(multipliers, rows, precision="highest")
            return pulled, jnp.where(mask, 0, multipliers)

        for _ in range(self._rounds):
            left = right - jnp.matmul(total, rows, precision="highest")
            total = total + self._solve(multiply, (left, nothing), nothing)
        return total

    @property
    def _rounds(self) -> int:
        return self.passes if self.solver is None else 1

    def _solve(self, multiply: Callable[[Any], Any], right: Any, like: Any) -> Any:
        solver, damp = self.solver, 0.0
        if solver is None:
            solver, damp = Cholesky(), choose_damping(jax.tree.leaves(like)[0].dtype) ** 0.5
        return lstsq(multiply, right, like=like, damp=damp, solver=solver, is_linear=True)[0]


def choose_damping(dtype: DTypeLike) -> float:
    """What to add to the diagonal of a Gram matrix of unit rows."""
    return ROUNDINGS * float(jnp.finfo(dtype).eps)
