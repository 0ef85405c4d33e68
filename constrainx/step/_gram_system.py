"""The rows of a step solved by their Gram matrix."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from constrainx.linalg import norm
from constrainx.step._jacobian import StackedJacobian
from constrainx.step._memory import keep_in_memory
from constrainx.step._multipliers import find_active_rows, is_optimal, solve_gram
from constrainx.step._rows import Rows, spread
from constrainx.step._system import (
    LONGEST_STEP,
    Correction,
    leave,
    measure_longest,
    subtract,
)

# The solution of a quadratic program is accepted if its objective is certain to this part of the
# squared length of the change, which bounds half of the squared distance from the nearest vector.
GAP = 1e-3


class GramSystem(NamedTuple):
    """Solves by the Gram matrix J P D Jᵀ, which is exact, for inequalities as well."""

    jacobian: StackedJacobian
    # In the metric of the identity, so that it is shared by both stages of a step.
    gram: Float[Array, "rows rows"]

    @property
    def values(self) -> Float[Array, " rows"]:
        """The values c."""
        return self.jacobian.values

    def correct(
        self, vector: PyTree, rows: Rows, parameters: PyTree, metric: PyTree | None = None
    ) -> Correction:
        """Solves the small dense problem."""
        if not rows.movable_alone:
            # A gradient comes from a product, and is in memory.
            vector = keep_in_memory(vector, unknown=rows.target)
        gram, symmetric = self._find_gram(rows, metric)
        before = rows.sign * self.jacobian.matvec(vector, movable_alone=rows.movable_alone)
        excess = before - rows.target
        active, found = rows.acts, jnp.ones((), bool)
        lengths = jnp.sqrt(jnp.maximum(jnp.diagonal(gram), 0))
        if metric is None:
            active &= ~find_unreachable(rows, lengths, parameters)
        # Rows that are closer to each other than this, as an angle, cannot be told apart by G.
        angle = math.sqrt(2 * max(len(excess), 16) * float(jnp.finfo(gram.dtype).eps))
        slack = 2 * angle * lengths * measure_longest(excess, lengths, rows, active)
        damping = self._find_damping(rows, gram)
        damped = gram if rows.damping is None else gram + jnp.diag(damping)
        if np.any(rows.inequality):
            active, found = find_active_rows(
                damped, excess, active, jnp.asarray(rows.inequality), symmetric=symmetric
            )
        multipliers = solve_gram(damped, excess, active, symmetric=symmetric)
        yielded = damping * multipliers
        change = self.jacobian.rmatvec(multipliers, vector)
        if metric is not None:
            change = jax.tree.map(jnp.multiply, metric, change)
        if np.any(rows.inequality):
            # G squares the condition of the rows, so a program in it may be another than in J.
            moved = self.jacobian.matvec(change, movable_alone=rows.movable_alone)
            found &= is_optimal(
                multipliers,
                excess,
                excess - moved - yielded,
                jnp.sqrt(jnp.square(lengths) + damping),
                rows.acts,
                jnp.asarray(rows.inequality),
                rounding=4 * jnp.finfo(gram.dtype).eps * (jnp.abs(before) + jnp.abs(rows.target)),
                tolerance=max(GAP, 8 * _find_coarsest(change)),
            )
        else:
            # Without another pass over the parameters.
            moved = jnp.matmul(gram, multipliers, precision="highest")
        return Correction(
            vector=subtract(vector, change, rows.sign),
            rows=rows,
            before=before,
            after=before - moved,
            multipliers=multipliers,
            iterations=jnp.ones((), jnp.int32),
            converged=found & jnp.all(jnp.isfinite(multipliers)),
            slack=slack,
            yielded=yielded,
        )

    def leave(self, vector: PyTree, rows: Rows) -> Correction:
        """The same vector."""
        return leave(vector, rows, jnp.zeros_like(rows.values))

    def _find_damping(self, rows: Rows, gram: Float[Array, "rows rows"]) -> Float[Array, " rows"]:
        """The damping m of each row."""
        if rows.damping is None:
            return jnp.zeros_like(rows.values)
        counts = [len(part.values) for part in self.jacobian.parts]
        squares = jnp.split(jnp.diagonal(gram), np.cumsum(counts)[:-1])
        return rows.damping * spread([jnp.mean(own) for own in squares], counts)

    def _find_gram(
        self, rows: Rows, metric: PyTree | None
    ) -> tuple[Float[Array, "rows rows"], bool]:
        """The Gram matrix of what is asked, and whether it is symmetric."""
        symmetric = self.jacobian.is_symmetric
        if metric is None and (symmetric or not rows.movable_alone):
            return self.gram, symmetric
        gram = self.jacobian.gram(metric, movable_alone=rows.movable_alone)
        return gram, symmetric or rows.movable_alone


def find_unreachable(
    rows: Rows, lengths: Float[Array, " rows"], parameters: PyTree
) -> Bool[Array, " rows"]:
    """The rows that ask for a step so long that their gradient must be rounding alone.

    They do not act, and are reported as not resolved.

    Args:
        rows: what is asked.
        lengths: of their gradients.
        parameters: which a step is compared with.
    """
    wanted = jnp.where(rows.inequality, jnp.maximum(-rows.target, 0), jnp.abs(rows.target))
    bound = LONGEST_STEP / float(jnp.finfo(lengths.dtype).eps)
    longest = jax.lax.cond(
        # A pass over the parameters is for the rare case.
        jnp.any(wanted > bound * lengths),
        lambda: bound * (1 + norm(parameters)).astype(lengths.dtype),
        lambda: jnp.full((), jnp.inf, lengths.dtype),
    )
    return jax.lax.stop_gradient(rows.acts & (wanted > longest * lengths))


def _find_coarsest(vector: PyTree) -> float:
    """The relative rounding of the leaves with the fewest digits."""
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(vector))
