"""The nearest point at which constraints hold, with derivatives of all orders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from constrainx.constraints import find_live_inputs
from constrainx.layers._curved import Found, descend, solve_optimality
from constrainx.layers._linearised import linearise, move, solve_quadratic
from constrainx.layers._solving import Solving
from constrainx.linalg import Solver

Excess: TypeAlias = Callable[[PyTree, Float[Array, " n"]], Float[Array, " rows"]]
# How often a point is brought back on the constraints at the end.
REFINEMENTS = 8


def find_nearest(
    excess: Excess,
    x: PyTree,
    target: Float[Array, " n"],
    *,
    tolerance: Float[np.ndarray, " rows"],
    equalities: int,
    solver: Solver | None,
    max_iterations: int,
) -> Found:
    """The point y nearest to the target at which the values are zero, or at most zero.

    For constraints that are affine in y this is a quadratic program, solved exactly; for others,
    see `descend`. Derivatives with respect to x and the target follow from the optimality
    conditions, H dy + Jᵀdλ = dtarget − d(Jᵀλ) and J dy = −dc on the active rows, so that nothing is
    unrolled: a gradient costs one more least-squares problem.

    Args:
        excess: (x, y) ↦ the values, equalities first.
        x: what else they depend on.
        target: the point to be near to.
        tolerance: how small each violation must be.
        equalities: how many of the values are equalities.
        solver: of least squares; a damped Cholesky factorisation if None.
        max_iterations: for constraints that are not affine.
    """
    is_affine = is_affine_in_y(excess, x, target)
    exactly, once = Solving(solver), Solving(solver, passes=1)

    @jax.custom_jvp
    def solve(x: PyTree, target: Array) -> Found:
        here = functools.partial(excess, x)
        if is_affine:
            at = linearise(here, target, equalities, exactly)
            start = solve_quadratic(at, target, exactly)
            multipliers = start.multipliers * at.scale
            yes = jnp.ones((), bool)
            found = Found(start.y, multipliers, start.active, start.iterations, yes)

            def improve(y: Array) -> Array:
                wish = jnp.zeros_like(y)
                return y + move(at, start.active, wish, -here(y) * at.scale, once)

        else:
            found = descend(here, target, equalities, once, max_iterations)

            def improve(y: Array) -> Array:
                return solve_quadratic(linearise(here, y, equalities, once), y, once).y

        def exceed(y: Array) -> Float[Array, ""]:
            values = here(y)
            misses = jnp.concatenate([jnp.abs(values[:equalities]), values[equalities:]])
            # A fourth of the tolerance, because others may sum in another order.
            return jnp.max(misses / jnp.maximum(0.25 * tolerance, jnp.finfo(y.dtype).tiny))

        return found._replace(y=_refine(improve, exceed, found.y))

    @solve.defjvp
    def differentiate(primals: tuple, tangents: tuple) -> tuple[Found, Found]:
        (x, target), (dx, dtarget) = primals, tangents
        found = solve(x, target)
        y, multipliers, active = found.y, found.multipliers, found.active
        here = functools.partial(excess, x)
        at = linearise(here, y, equalities, exactly)

        def condition(x: PyTree) -> tuple[Array, Array]:
            values, pull = jax.vjp(functools.partial(excess, x), y)
            return pull(multipliers)[0], values

        _, (turned, shifted) = jax.jvp(condition, (x,), (dx,))
        wish, right = dtarget - turned, -shifted * at.scale
        if is_affine:
            dy = move(at, active, wish, right, exactly)
            inner = exactly.find_multipliers(at.inner, wish - dy, active=active)
            rest = wish - dy - inner @ at.at_most_rows
            outer = exactly.find_multipliers(at.equal_rows, rest)
            change = jnp.concatenate([outer, inner])
        else:
            dy, change = solve_optimality(here, at, multipliers, active, wish, right)
        zero: Any = functools.partial(np.zeros, dtype=jax.dtypes.float0)
        return found, Found(
            dy,
            change * at.scale,
            zero(active.shape),
            zero(found.iterations.shape),
            zero(found.optimal.shape),
        )

    return solve(x, target)


def is_affine_in_y(excess: Excess, x: PyTree, y: Float[Array, " n"]) -> bool:
    """Whether the values are affine in y: their derivative does not depend on y."""

    def differentiate(y: Array, x: PyTree, direction: Array) -> Array:
        return jax.jvp(functools.partial(excess, x), (y,), (direction,))[1]

    return not find_live_inputs(jax.make_jaxpr(differentiate)(y, x, y))[0]


def _refine(
    improve: Callable[[Array], Array],
    exceed: Callable[[Array], Float[Array, ""]],
    start: Float[Array, " n"],
) -> Float[Array, " n"]:
    """Improves a point until it does not exceed one; the best that was seen."""

    def go_on(state: tuple) -> Bool[Array, ""]:
        _, excess, rounds, closer = state
        return (excess > 1) & (rounds < REFINEMENTS) & closer

    def repeat(state: tuple) -> tuple[Any, ...]:
        y, excess, rounds, _ = state
        other = improve(y)
        reached = exceed(other)
        closer = reached < excess
        return (
            jnp.where(closer, other, y),
            jnp.where(closer, reached, excess),
            rounds + 1,
            closer,
        )

    first = (start, exceed(start), jnp.zeros((), jnp.int32), jnp.ones((), bool))
    return jax.lax.while_loop(go_on, repeat, first)[0]
