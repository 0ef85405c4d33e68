"""Which of many inequalities are active, by products with the Jacobian alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Steps of the power method, after which the largest eigenvalue is known to a factor of two.
POWERS = 12


class Bounded(NamedTuple):
    """The solution of a quadratic program.

    Attributes:
        active: the rows whose multipliers are positive or not bounded. If it has not converged,
            also those that are still short, so that rows without a common solution share what
            there is.
        iterations: products with G.
        converged: whether the tolerance was reached.
    """

    active: Bool[Array, " rows"]
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]


class _Search(NamedTuple):
    """An iterate λ, the gradient G λ − e, a conjugate direction, and what has been spent."""

    multipliers: Float[Array, " rows"]
    gradient: Float[Array, " rows"]
    direction: Float[Array, " rows"]
    iterations: Int[Array, ""]
    stuck: Bool[Array, ""]


def solve_bounded(
    apply: Callable[[Float[Array, " rows"]], Float[Array, " rows"]],
    right: Float[Array, " rows"],
    bounded: Bool[Array, " rows"],
    *,
    tolerance: Float[Array, ""],
    max_iterations: int,
) -> Bounded:
    """Minimises ½ λᵀG λ − λᵀe with λ ≥ 0 for some rows and G known by its products alone.

    Conjugate gradients on the rows that are free, that is positive or not bounded. Where the next
    one would leave the bounds, a projected gradient step of fixed length drops all rows that it
    takes to zero at once; where the rows at zero have more to gain than the free ones, they are let
    go. This is modified proportioning with reduced gradient projections (Dostál and Schöberl,
    "Minimizing quadratic functions subject to bound constraints with the rate of convergence and
    finite termination", 2005). It ends where the residuals of all free rows, and those of rows at
    zero that want to grow, are below the tolerance in norm: the optimality conditions.

    Args:
        apply: λ ↦ G λ, symmetric and positive semidefinite.
        right: e. Rows of unit length, that is a diagonal of ones in G, converge fastest.
        bounded: whose multipliers must not be negative.
        tolerance: the norm of the residuals at which to stop.
        max_iterations: how many products to spend.
    """
    largest = _estimate_norm(apply, right)
    step = 1 / largest
    rounding = 4 * jnp.finfo(right.dtype).eps * largest

    def split(multipliers: Array, gradient: Array) -> tuple[Array, Array]:
        """The residuals of free rows, and of those at zero that want to grow."""
        free = ~bounded | (multipliers > 0)
        return jnp.where(free, gradient, 0), jnp.where(free, 0, jnp.minimum(gradient, 0))

    def clip(multipliers: Array) -> Array:
        return jnp.where(bounded, jnp.maximum(multipliers, 0), multipliers)

    def measure(search: _Search) -> Float[Array, ""]:
        return jnp.linalg.norm(sum(split(search.multipliers, search.gradient)))

    def go_on(search: _Search) -> Bool[Array, ""]:
        unfinished = (measure(search) > tolerance) & (search.iterations < max_iterations)
        return unfinished & ~search.stuck

    def improve(search: _Search) -> _Search:
        multipliers, gradient, direction, spent, _ = search
        free, chopped = split(multipliers, gradient)
        reduced = jnp.where(bounded, jnp.minimum(multipliers / step, free), free)
        proportional = chopped @ chopped <= reduced @ free
        direction = jnp.where(proportional, direction, chopped)
        product = apply(direction)
        curvature = direction @ product
        curved = curvature > rounding * (direction @ direction)
        length = jnp.where(curved, gradient @ direction / jnp.where(curved, curvature, 1), jnp.inf)
        falling = bounded & (direction > 0)
        reach = jnp.where(falling, multipliers / jnp.where(falling, direction, 1), jnp.inf)
        nearest = jnp.min(reach)
        # If neither is finite, the objective falls without end: the rows have no common solution.
        taken = jnp.minimum(length, nearest)
        stuck = ~jnp.isfinite(taken)
        taken = jnp.where(stuck, 0, taken)
        moved = clip(multipliers - taken * direction)
        moved = jnp.where(falling & (reach <= taken), 0, moved)
        reached = gradient - taken * product
        rest, _ = split(moved, reached)

        def expand() -> tuple[Array, Array, Array, Int[Array, ""]]:
            expanded = clip(moved - step * rest)
            slope = apply(expanded) - right
            return expanded, slope, split(expanded, slope)[0], spent + 2

        def stay() -> tuple[Array, Array, Array, Int[Array, ""]]:
            along = jnp.where(curved, rest @ product / jnp.where(curved, curvature, 1), 0)
            conjugate = jnp.where(proportional, rest - along * direction, rest)
            return moved, reached, conjugate, spent + 1

        blocked = proportional & (nearest < length)
        following, slope, conjugate, iterations = jax.lax.cond(blocked, expand, stay)
        return _Search(following, slope, conjugate, iterations, stuck)

    start = jnp.zeros_like(right)
    first, _ = split(start, -right)
    search = _Search(start, -right, first, jnp.asarray(POWERS, jnp.int32), jnp.zeros((), bool))
    found = jax.lax.while_loop(go_on, improve, search)
    converged = measure(found) <= tolerance
    active = ~bounded | (found.multipliers > 0) | (~converged & (found.gradient < 0))
    return Bounded(active, found.iterations, converged)


def _estimate_norm(
    apply: Callable[[Float[Array, " rows"]], Float[Array, " rows"]], like: Float[Array, " rows"]
) -> Float[Array, ""]:
    """The largest eigenvalue, by the power method; one if the matrix is zero."""

    def multiply(vector: Array, _: None) -> tuple[Array, Array]:
        product = apply(vector)
        length = jnp.linalg.norm(product)
        return product / jnp.where(length > 0, length, 1), length

    start = jax.random.normal(jax.random.key(0), like.shape, like.dtype)
    _, lengths = jax.lax.scan(multiply, start / jnp.linalg.norm(start), length=POWERS)
    return jnp.where(lengths[-1] > 0, lengths[-1], 1)
