"""The small dense problem of a step: which rows act, and with which multipliers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def solve_gram(
    gram: Float[Array, "k k"], right: Float[Array, " k"], active: Bool[Array, " k"]
) -> Float[Array, " k"]:
    """λ with G λ = r on the active rows and zero elsewhere; finite also where G is singular.

    Rows are scaled to unit length, a multiple of the rounding error is added to the diagonal, and
    refinement takes its effect out again where G is regular. Where rows depend on each other it
    stays: rows that contradict share what they cannot both have.
    """
    k = len(right)
    diagonal = jnp.diagonal(gram)
    active = active & (diagonal > 0)  # a row without a gradient has nothing to move
    lengths = jnp.where(active, jnp.sqrt(jnp.where(active, diagonal, 1)), 1)
    keep = active.astype(gram.dtype)
    scaled = gram / (lengths[:, None] * lengths) * (keep[:, None] * keep)
    scaled += jnp.diag(1 - keep)
    right = right / lengths * keep
    if k == 1:
        return right / lengths
    shift = 2 * max(k, 16) * jnp.finfo(gram.dtype).eps
    factor = jnp.linalg.cholesky(scaled + shift * jnp.eye(k, dtype=gram.dtype))
    solution = jnp.zeros_like(right)
    for _ in range(3):
        residual = right - jnp.matmul(scaled, solution, precision="highest")
        solution += jax.scipy.linalg.cho_solve((factor, True), residual)
    return solution / lengths * keep


def active_rows(
    gram: Float[Array, "k k"],
    excess: Float[Array, " k"],
    acts: Bool[Array, " k"],
    inequality: Bool[Array, " k"],
) -> Bool[Array, " k"]:
    """The rows that are active at the solution of the quadratic program.

        minimise ½ λᵀG λ − λᵀe    with    λ ≥ 0 for inequalities,

    by the dual active-set method: drop the row with the most negative multiplier, else add the one
    that is violated most, until there is neither. Equalities are always active.
    """
    gram, excess = jax.lax.stop_gradient((gram, excess))
    k = len(excess)
    scale = jnp.sqrt(jnp.maximum(jnp.diagonal(gram), jnp.finfo(gram.dtype).tiny))
    slack = 10 * k * jnp.finfo(gram.dtype).eps * (jnp.max(jnp.abs(excess)) + 1e-30)

    def body(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        active, count, _ = state
        multipliers = solve_gram(gram, excess, active)
        # Compared in units of the step that a row asks for, which do not depend on its scale.
        negative = jnp.where(active & inequality, multipliers * scale, 0)
        violated = excess - gram @ multipliers - slack
        violated = jnp.where(acts & inequality & ~active, violated / scale, 0)
        drop, add = jnp.argmin(negative), jnp.argmax(violated)
        must_drop, must_add = negative[drop] < 0, violated[add] > 0
        change = jnp.where(must_drop, drop, add)
        flipped = active.at[change].set(~active[change])
        moving = must_drop | must_add
        return jnp.where(moving, flipped, active), count + 1, ~moving

    def go_on(state: tuple[Array, Int[Array, ""], Bool[Array, ""]]) -> Array:
        _, count, done = state
        return ~done & (count < 3 * k + 8)

    start = acts & (~inequality | (excess > 0))
    done = ~jnp.any(acts & inequality)
    active, _, _ = jax.lax.while_loop(go_on, body, (start, jnp.zeros((), jnp.int32), done))
    return active
