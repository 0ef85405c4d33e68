"""The nearest point of curved constraints, by sequential quadratic programming."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from constrainx.layers._linearised import Linearised, linearise, solve_quadratic
from constrainx.layers._solving import Solving
from constrainx.linalg import LSMR, lstsq

# Step lengths that a line search tries: 1, ½, …
HALVINGS = 14
# How many steps may pass without the optimality conditions getting closer.
STALLED = 8


class _Search(NamedTuple):
    y: Float[Array, " n"]
    multipliers: Float[Array, " rows"]
    active: Bool[Array, " inequalities"]
    weight: Float[Array, ""]
    distance: Float[Array, ""]
    best: Float[Array, ""]
    stalled: Int[Array, ""]
    iterations: Int[Array, ""]


class Found(NamedTuple):
    """A point, its multipliers, and how it was found.

    Attributes:
        y: the point.
        multipliers: λ, for rows as they are given, equalities first.
        active: the inequalities with a positive multiplier.
        iterations: steps taken.
        optimal: whether the optimality conditions hold to rounding.
    """

    y: Float[Array, " n"]
    multipliers: Float[Array, " rows"]
    active: Bool[Array, " inequalities"]
    iterations: Int[Array, ""]
    optimal: Bool[Array, ""]


def descend(
    excess: Callable[[Array], Array],
    target: Float[Array, " n"],
    equalities: int,
    solving: Solving,
    max_iterations: int,
) -> Found:
    """Looks for the nearest point to the target with values of zero, or of at most zero.

    Each iteration projects the target on the linearised constraints, a Gauss-Newton step, and
    halves it until the merit ½‖y − target‖² + w‖violation‖₁ falls. A Newton step on the optimality
    conditions, with the curvature of the constraints and the same active rows, is taken instead
    where it brings the conditions to less than half; so convergence is quadratic in the end.

    Args:
        excess: y ↦ the values, equalities first.
        target: where to start, and what to be near to.
        equalities: how many of the values are equalities.
        solving: how to solve the least-squares problems of the projections.
        max_iterations: how many steps to take.
    """
    goal = 64 * jnp.finfo(target.dtype).eps

    def violate(values: Array) -> Array:
        return jnp.concatenate([jnp.abs(values[:equalities]), jnp.maximum(values[equalities:], 0)])

    def measure(y: Array, multipliers: Array, scale: Array) -> Float[Array, ""]:
        """The distance from the optimality conditions, in units of y."""
        values, pull = jax.vjp(excess, y)
        slope = y - target + pull(multipliers)[0]
        values, unit = values * scale, multipliers / scale
        slack = jnp.minimum(unit[equalities:], -values[equalities:])
        parts = jnp.concatenate([slope, values[:equalities], slack])
        return jnp.max(jnp.abs(parts)) / (1 + jnp.max(jnp.abs(y)))

    def go_on(search: _Search) -> Bool[Array, ""]:
        open_ended = (search.iterations < max_iterations) & (search.stalled < STALLED)
        return (search.distance > goal) & open_ended

    def improve(search: _Search) -> _Search:
        at = linearise(excess, search.y, equalities, solving)
        found = solve_quadratic(at, target, solving)
        weight = jnp.maximum(search.weight, 2 * jnp.max(jnp.abs(found.multipliers)))

        def merit(y: Array) -> Float[Array, ""]:
            miss = jnp.sum(violate(excess(y) * at.scale))
            return 0.5 * jnp.sum(jnp.square(y - target)) + weight * miss

        step = found.y - search.y
        lengths = 0.5 ** jnp.arange(HALVINGS, dtype=target.dtype)
        now = merit(search.y)
        here = jnp.concatenate([at.equal, at.at_most])
        slope = (search.y - target) @ step - weight * jnp.sum(violate(here))
        merits = jax.vmap(lambda length: merit(search.y + length * step))(lengths)
        falls = merits <= now + 1e-4 * lengths * jnp.minimum(slope, 0)
        length = jnp.where(jnp.any(falls), lengths[jnp.argmax(falls)], lengths[-1])
        y = search.y + length * step
        multipliers = found.multipliers * at.scale

        moved, changed = solve_optimality(
            excess,
            at,
            multipliers,
            found.active,
            target - search.y - pull_back(at, found.multipliers),
            -here,
        )
        newton = search.y + moved
        newton_multipliers = multipliers + changed * at.scale
        signs = jnp.all(newton_multipliers[equalities:] >= 0)
        distance = measure(y, multipliers, at.scale)
        newton_distance = measure(newton, newton_multipliers, at.scale)
        better = newton_distance < jnp.minimum(0.5 * search.distance, distance)
        # A step to a point that is no minimum raises the merit; rounding hides the last digits.
        falls = merit(newton) <= now + 1e-2 * jnp.abs(now)
        better &= signs & falls
        distance = jnp.where(better, newton_distance, distance)
        closer = distance < 0.9 * search.best
        return _Search(
            jnp.where(better, newton, y),
            jnp.where(better, newton_multipliers, multipliers),
            found.active,
            weight,
            distance,
            jnp.minimum(search.best, distance),
            jnp.where(closer, 0, search.stalled + 1),
            search.iterations + 1,
        )

    rows = jax.eval_shape(excess, target)
    infinite = jnp.asarray(jnp.inf, target.dtype)
    search = jax.lax.while_loop(
        go_on,
        improve,
        _Search(
            target,
            jnp.zeros(rows.shape, target.dtype),
            jnp.zeros(rows.shape[0] - equalities, bool),
            jnp.zeros((), target.dtype),
            infinite,
            infinite,
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.int32),
        ),
    )
    # Rounding leaves more of the slope than of the values.
    optimal = search.distance <= 64 * goal
    return Found(search.y, search.multipliers, search.active, search.iterations, optimal)


def pull_back(at: Linearised, multipliers: Float[Array, " rows"]) -> Float[Array, " n"]:
    """Jᵀλ for the scaled rows."""
    equalities = len(at.equal)
    return multipliers[:equalities] @ at.equal_rows + multipliers[equalities:] @ at.at_most_rows


def solve_optimality(
    excess: Callable[[Array], Array],
    at: Linearised,
    multipliers: Float[Array, " rows"],
    active: Bool[Array, " inequalities"],
    wish: Float[Array, " n"],
    right: Float[Array, " rows"],
) -> tuple[Float[Array, " n"], Float[Array, " rows"]]:
    """Solves H v + Jᵀμ = wish and J v = right on the active rows, with μ = 0 on the others.

    H = I + Σ λ ∇²c has the curvature of the constraints. The matrix is symmetric, indefinite, and
    singular where active rows depend on each other, and LSMR finds v in any case.

    Args:
        excess: y ↦ the values, equalities first.
        at: their linearisation about the point.
        multipliers: λ, for rows as they are given.
        active: which inequalities count.
        wish: the right-hand side of the first equations.
        right: that of the second ones, in units of the scaled rows.

    Returns:
        v, and μ for the scaled rows.
    """
    rows = jnp.concatenate([at.equal_rows, at.at_most_rows])
    mask = jnp.concatenate([jnp.ones(len(at.equal), bool), active])
    rows = jnp.where(mask[:, None], rows, 0)
    slope = jax.grad(lambda y: jnp.vdot(multipliers, excess(y)))
    _, bend = jax.linearize(slope, at.point)

    def multiply(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        v, change = pair
        upper = v + bend(v) + jnp.matmul(change, rows, precision="highest")
        lower = jnp.matmul(rows, v, precision="highest") + jnp.where(mask, 0, change)
        return upper, lower

    rtol = 2 * float(jnp.finfo(wish.dtype).eps)
    solved, _ = lstsq(
        multiply,
        (wish, jnp.where(mask, right, 0)),
        like=(wish, right),
        solver=LSMR(rtol=rtol, condition_limit=float("inf")),
        is_linear=True,
    )
    return solved
