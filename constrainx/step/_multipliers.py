"""The small dense problem of a step: which rows act, and with which multipliers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# With more rows than this, conjugate gradients are tried before the factorisation. On one CPU a
# step with 640 rows of a network then took 23 ms; the factorisation alone had taken 54.
ROWS_FACTORISED = 256


class _Scaled(NamedTuple):
    """A system in rows of unit length: C = G / (l lᵀ), e / l, with λ l as its unknowns."""

    gram: Float[Array, "k k"]
    right: Float[Array, " k"]
    lengths: Float[Array, " k"]
    active: Bool[Array, " k"]


def solve_gram(
    gram: Float[Array, "k k"],
    right: Float[Array, " k"],
    active: Bool[Array, " k"],
    *,
    symmetric: bool = True,
) -> Float[Array, " k"]:
    """λ with G λ = r on the active rows and zero elsewhere; finite even where G is singular.

    Rows are scaled to unit length first, so that their units do not matter. Where they depend on
    each other, up to rounding, λ is the solution of minimum norm of the least-squares problem: rows
    that contradict share what they cannot both have.

    Args:
        gram: G.
        right: r.
        active: which rows take part.
        symmetric: whether G is; otherwise it is solved by its singular values.
    """
    scaled = _scale(gram, right, active)
    return _solve(scaled, symmetric=symmetric) / scaled.lengths


def find_active_rows(
    gram: Float[Array, "k k"],
    excess: Float[Array, " k"],
    acts: Bool[Array, " k"],
    inequality: Bool[Array, " k"],
    *,
    symmetric: bool = True,
) -> tuple[Bool[Array, " k"], Bool[Array, ""]]:
    """The rows that are active at the solution of the quadratic program, and whether it was found.

        minimise ½ λᵀG λ − λᵀe    with    λ ≥ 0 for inequalities.

    Equalities are always active. An active-set method on rows of unit length: λ stays feasible;
    solve on the active rows, and go towards that solution until a multiplier would turn negative,
    whose row is dropped; once there, add the row that is violated most. Where active rows depend on
    each other and contradict, the residual is a direction along which the objective falls without
    end, and λ follows it until a row can be dropped; if none can, the rows have no common solution.
    """
    gram, excess = jax.lax.stop_gradient((gram, excess))
    k = len(excess)
    everything = _scale(gram, excess, acts)
    acts = everything.active
    eps = jnp.finfo(gram.dtype).eps
    magnitudes = jnp.abs(everything.gram)

    class Search(NamedTuple):
        active: Bool[Array, " k"]
        multipliers: Float[Array, " k"]
        tries: Int[Array, ""]
        done: Bool[Array, ""]
        feasible: Bool[Array, ""]

    def measure_rounding(multipliers: Array) -> Float[Array, " k"]:
        """What the residual of each row may be off by."""
        sizes = jnp.abs(everything.right) + magnitudes @ jnp.abs(multipliers)
        return 4 * max(k, 8) * eps * sizes

    def go_on(search: Search) -> Bool[Array, ""]:
        return ~search.done & (search.tries < 10 * k + 20)

    def improve(search: Search) -> Search:
        current, active = search.multipliers, search.active
        scaled = _restrict(everything, active)
        solution = _solve(scaled, symmetric=symmetric)
        left = jnp.where(active, everything.right - everything.gram @ solution, 0)
        # Ten times as much, because the rank was decided with about that tolerance.
        rounding = measure_rounding(solution)
        contradicts = jnp.any(jnp.abs(left) > 10 * rounding + 1e3 * eps * _largest(solution))
        direction = jnp.where(contradicts, left, solution - current)
        falling = active & inequality & (direction < 0)
        falling &= contradicts | (solution < 0)
        reach = jnp.where(falling, current / jnp.where(falling, -direction, 1), jnp.inf)
        step = jnp.min(reach)
        blocked = jnp.any(falling)
        # A part of the way, and drop what has arrived at zero.
        moved = jnp.where(active, current + jnp.where(blocked, step, 0) * direction, 0)
        dropped = falling & (reach <= step)
        # Or all of the way, and add what is violated most.
        violated = everything.right - everything.gram @ solution - rounding
        violated = jnp.where(acts & inequality & ~active, violated, 0)
        worst = jnp.argmax(violated)
        adds = violated[worst] > 0
        arrived = ~blocked
        added = jnp.zeros(k, bool).at[worst].set(adds & ~contradicts)
        return Search(
            active=jnp.where(arrived, active | added, active & ~dropped),
            multipliers=jnp.where(arrived, solution, jnp.where(dropped, 0, moved)),
            tries=search.tries + 1,
            done=arrived & (contradicts | ~adds),
            feasible=~(arrived & contradicts),
        )

    start = acts & (~inequality | (everything.right > 0))
    search = Search(
        active=start,
        multipliers=jnp.zeros_like(excess),
        tries=jnp.zeros((), jnp.int32),
        done=~jnp.any(acts & inequality),
        feasible=jnp.ones((), bool),
    )
    found = jax.lax.while_loop(go_on, improve, search)
    return found.active, found.done & found.feasible


def is_optimal(
    multipliers: Float[Array, " k"],
    excess: Float[Array, " k"],
    left: Float[Array, " k"],
    lengths: Float[Array, " k"],
    acts: Bool[Array, " k"],
    inequality: Bool[Array, " k"],
    *,
    rounding: Float[Array, " k"],
    tolerance: float,
) -> Bool[Array, ""]:
    """Whether multipliers solve the quadratic program, judged by what they leave of the rows.

    With λ ≥ 0 for inequalities and v' = v − D Jᵀλ, the nearest vector v* with multipliers λ* obeys

        ½ ‖v' − v*‖² ≤ λ*ᵀ max(w, 0) − λᵀw,    w = J v' − t.

    λ* is not known. On rows at zero it is taken for the largest λ, and for λ on all others.

    Args:
        multipliers: λ.
        excess: J v − t.
        left: w, by products with J itself.
        lengths: of the rows in the metric, whose units then do not matter.
        acts: which rows take part.
        inequality: which are inequalities.
        rounding: what w may be off by, in each row.
        tolerance: the bound, as a part of ‖v' − v‖² = λᵀ(J v − J v').
    """
    counts = acts & (lengths > 0)
    lengths = jnp.where(counts, lengths, 1)
    scaled = jnp.where(counts, multipliers * lengths, 0)
    largest = _largest(scaled)
    off = jnp.where(counts, jnp.maximum(jnp.abs(left) - rounding, 0), 0) / lengths
    idle = inequality & (scaled == 0)
    gap = jnp.sum(jnp.where(idle, jnp.where(left > 0, largest, 0), jnp.abs(scaled)) * off)
    moved = jnp.sum(jnp.where(counts, multipliers * (excess - left), 0))
    is_dual = ~jnp.any(inequality & (scaled < -tolerance * largest))
    return is_dual & (gap <= tolerance * moved)


def _scale(gram: Array, right: Array, active: Bool[Array, " k"]) -> _Scaled:
    diagonal = jnp.diagonal(gram)
    active = active & (diagonal > 0)  # a row without a gradient has nothing to move
    lengths = jnp.where(active, jnp.sqrt(jnp.where(active, diagonal, 1)), 1)
    # Two divisions, because the product of two lengths may overflow.
    scaled = _Scaled(gram / lengths[:, None] / lengths, right / lengths, lengths, active)
    return _restrict(scaled, active)


def _restrict(scaled: _Scaled, active: Bool[Array, " k"]) -> _Scaled:
    """The identity in place of the rows that do not act, and the rest as it is."""
    both = active[:, None] & active
    identity = jnp.eye(len(active), dtype=scaled.gram.dtype)
    return _Scaled(
        jnp.where(both, scaled.gram, jnp.where(active, 0, identity)),
        jnp.where(active, scaled.right, 0),
        scaled.lengths,
        active,
    )


def _solve(scaled: _Scaled, *, symmetric: bool) -> Float[Array, " k"]:
    """λ l, by Cholesky's factorisation, or by eigenvalues if the rows are nearly dependent."""
    gram, right, _, active = scaled
    k = len(right)
    if k == 1:
        return right
    if not symmetric:
        return jnp.where(active, _solve_by_singular_values(gram, right), 0)
    if k <= ROWS_FACTORISED:
        return jnp.where(active, _solve_by_factors(gram, right), 0)
    found, converged = solve_by_gradients(gram, right)
    return jnp.where(
        active, jax.lax.cond(converged, lambda: found, lambda: _solve_by_factors(gram, right)), 0
    )


def _solve_by_factors(gram: Array, right: Array) -> Array:
    k = len(right)
    cut = 2 * max(k, 16) * float(jnp.finfo(gram.dtype).eps)
    factor = jnp.linalg.cholesky(gram + cut * jnp.eye(k, dtype=gram.dtype))
    # The squared pivot is the squared distance of a row from the span of those before it.
    pivots = jax.lax.stop_gradient(jnp.square(jnp.diagonal(factor)))
    independent = jnp.all(pivots > 20 * cut)  # false for NaN
    return jax.lax.cond(
        independent,
        lambda: _solve_by_cholesky(gram, right, factor),
        lambda: _solve_by_eigenvalues(gram, right, cut),
    )


def _solve_by_cholesky(gram: Array, right: Array, factor: Array) -> Array:
    """The shift of the diagonal is taken out again by refinement."""
    solution = jnp.zeros_like(right)
    for _ in range(3):
        residual = right - jnp.matmul(gram, solution, precision="highest")
        solution += jax.scipy.linalg.cho_solve((factor, True), residual)
    return solution


def _solve_by_eigenvalues(gram: Array, right: Array, cut: float) -> Array:
    values, vectors = jnp.linalg.eigh(gram)
    keep = values > cut
    inverse = jnp.where(keep, 1 / jnp.where(keep, values, 1), 0)

    def apply(vector: Array) -> Array:
        parts = inverse * jnp.matmul(vectors.T, vector, precision="highest")
        return jnp.matmul(vectors, parts, precision="highest")

    solution = apply(right)
    return solution + apply(right - jnp.matmul(gram, solution, precision="highest"))


def _solve_by_singular_values(gram: Array, right: Array) -> Array:
    cut = 2 * max(len(right), 16) * jnp.finfo(gram.dtype).eps
    return jnp.matmul(jnp.linalg.pinv(gram, rtol=cut), right, precision="highest")


def _largest(values: Array) -> Float[Array, ""]:
    return jnp.max(jnp.abs(values))


def solve_by_gradients(
    gram: Float[Array, "k k"], right: Float[Array, " k"]
) -> tuple[Float[Array, " k"], Bool[Array, ""]]:
    """λ with G λ = r by conjugate gradients, and whether they got there to rounding.

    They give up after k / 4 iterations, each of which is a product with G, before they have cost as
    much as a factorisation. Where rows depend on each other and do not contradict, they find the λ
    of minimum norm.

    Args:
        gram: G, symmetric, of rows of unit length.
        right: r.
    """
    # The attainable residual is the rounding of G λ.
    enough = jnp.square(4 * jnp.finfo(gram.dtype).eps) * jnp.sum(jnp.square(right))

    class Search(NamedTuple):
        solution: Float[Array, " k"]
        residual: Float[Array, " k"]
        direction: Float[Array, " k"]
        squared: Float[Array, ""]
        iterations: Int[Array, ""]

    def multiply(vector: Array) -> Array:
        return jnp.matmul(gram, vector, precision="highest")

    def search(_: Any, right: Array) -> Array:
        def improve(now: Search) -> Search:
            image = multiply(now.direction)
            curvature = jnp.sum(now.direction * image)
            step = now.squared / jnp.where(curvature > 0, curvature, jnp.inf)
            residual = now.residual - step * image
            squared = jnp.sum(jnp.square(residual))
            turn = squared / jnp.where(now.squared > 0, now.squared, 1)
            return Search(
                now.solution + step * now.direction,
                residual,
                residual + turn * now.direction,
                squared,
                now.iterations + 1,
            )

        def go_on(now: Search) -> Bool[Array, ""]:
            return (now.squared > enough) & (now.iterations < len(right) // 4)

        start = Search(
            jnp.zeros_like(right), right, right, jnp.sum(jnp.square(right)), jnp.zeros((), int)
        )
        return jax.lax.while_loop(go_on, improve, start).solution

    solution = jax.lax.custom_linear_solve(multiply, right, search, symmetric=True)
    # The recurrence may drift from the residual, which alone says how good the solution is.
    found, matrix, wanted = jax.lax.stop_gradient((solution, gram, right))
    left = wanted - jnp.matmul(matrix, found, precision="highest")
    rounding = 16 * jnp.finfo(gram.dtype).eps * jnp.linalg.norm(wanted)
    return solution, jnp.linalg.norm(left) <= rounding
