"""Linearised constraints: the nearest point, and corrections that keep to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from constrainx.layers._active import solve_bounded_dense
from constrainx.layers._solving import Solving, choose_damping


class Linearised(NamedTuple):
    """Constraints to first order about a point: c + J (y − point), equalities first.

    Rows are scaled to unit length. What is left of an inequality's row in the null space of the
    equalities is ``inner``: moving along it changes no equality.

    Attributes:
        point: where.
        equal: the values of the equalities there.
        at_most: the values of the inequalities there.
        equal_rows: the Jacobian of the equalities.
        at_most_rows: the Jacobian of the inequalities.
        inner: the rows of the inequalities, projected on the null space of the equalities.
        scale: what rows and values were multiplied by.
    """

    point: Float[Array, " n"]
    equal: Float[Array, " equalities"]
    at_most: Float[Array, " inequalities"]
    equal_rows: Float[Array, "equalities n"]
    at_most_rows: Float[Array, "inequalities n"]
    inner: Float[Array, "inequalities n"]
    scale: Float[Array, " rows"]


class Quadratic(NamedTuple):
    """The point of linearised constraints nearest to a target.

    Attributes:
        y: the point.
        multipliers: λ with y = target − Jᵀλ, for the scaled rows, equalities first.
        active: the inequalities with a positive multiplier.
        iterations: systems solved to find these.
    """

    y: Float[Array, " n"]
    multipliers: Float[Array, " rows"]
    active: Bool[Array, " inequalities"]
    iterations: Int[Array, ""]


def linearise(
    excess: Callable[[Array], Array],
    point: Float[Array, " n"],
    equalities: int,
    solving: Solving,
) -> Linearised:
    """Constraints to first order about a point.

    Args:
        excess: y ↦ the values, equalities first.
        point: where.
        equalities: how many of the values are equalities.
        solving: how to solve least squares.
    """
    values = excess(point)
    wide = len(values) < len(point)
    rows = (jax.jacrev if wide else jax.jacfwd)(excess)(point)
    lengths = jnp.linalg.norm(jax.lax.stop_gradient(rows), axis=1)
    scale = 1 / jnp.where(lengths > 0, lengths, 1)
    rows, values = rows * scale[:, None], values * scale
    equal, at_most = rows[:equalities], rows[equalities:]
    inner = at_most
    if equalities and len(at_most):
        inner = jax.vmap(lambda row: row - solving.find_least_norm(equal, equal @ row))(at_most)
    return Linearised(point, values[:equalities], values[equalities:], equal, at_most, inner, scale)


def solve_quadratic(at: Linearised, target: Float[Array, " n"], solving: Solving) -> Quadratic:
    """The nearest point to the target at which the linearised constraints hold.

    Where they contradict each other, the equalities come first, and the rest is nearly a
    least-squares compromise.
    """
    on_equal = target - solving.find_least_norm(
        at.equal_rows, at.equal + at.equal_rows @ (target - at.point)
    )
    if not len(at.at_most):
        multipliers = solving.find_multipliers(at.equal_rows, target - on_equal)
        nothing = jnp.zeros(0, bool)
        return Quadratic(on_equal, multipliers, nothing, jnp.ones((), jnp.int32))
    found = solve_bounded_dense(
        jnp.matmul(at.inner, at.inner.T, precision="highest"),
        at.at_most + at.at_most_rows @ (on_equal - at.point),
        damping=choose_damping(target.dtype),
    )
    y = on_equal - found.multipliers @ at.inner
    rest = target - y - found.multipliers @ at.at_most_rows
    multipliers = solving.find_multipliers(at.equal_rows, rest)
    return Quadratic(
        y,
        jnp.concatenate([multipliers, found.multipliers]),
        found.multipliers > 0,
        found.iterations,
    )


def move(
    at: Linearised,
    active: Bool[Array, " inequalities"],
    wish: Float[Array, " n"],
    right: Float[Array, " rows"],
    solving: Solving,
) -> Float[Array, " n"]:
    """The move nearest to ``wish`` by which the equalities and active rows change by ``right``."""
    equalities = len(at.equal)
    needed = right[:equalities] - at.equal_rows @ wish
    moved = wish + solving.find_least_norm(at.equal_rows, needed)
    if not len(at.at_most):
        return moved
    needed = right[equalities:] - at.at_most_rows @ moved
    return moved + solving.find_least_norm(at.inner, needed, active=active)
