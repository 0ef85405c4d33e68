"""How the least-squares solution moves when A, b or the damping λ do.

With r = b − A x the minimum-norm solution moves, at constant rank and without damping, by
(Golub and Pereyra, 1973)

    dx = A⁺(db − dA x) + (AᵀA)⁺ dAᵀ r + (I − A⁺A) dAᵀ y,    y = (Aᵀ)⁺ x,

which takes two solves that are linear in the tangents, and y, which is not a tangent at all:

    s = (Aᵀ)⁺ dAᵀ r,    v = dAᵀ y,    dx = v + A⁺(db − dA x + s − A v).

With damping and H = AᵀA + λ²I,

    dx = H⁻¹Aᵀ(db − dA x) + H⁻¹q,    q = dAᵀ r − 2λ x dλ,

where `_damped` says how H⁻¹q is found without dividing a difference by λ².
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from constrainx.linalg import _vector
from constrainx.linalg._damped import Solved, damped_tangent
from constrainx.linalg._operator import LinearOperator
from constrainx.linalg._primitive import solve
from constrainx.linalg._vector import Scalar, Vector


def solution_tangent(
    at: Solved, d_constants: dict[int, Array], d_b: Vector, d_damp: Scalar | None
) -> Vector:
    """dx, where a constant that is not in ``d_constants`` stays put, and so does a damp of None."""
    if not d_constants and d_damp is None:
        return solve(at.spec, at.constants, d_b, at.damp)[0]
    d_operator = _operator_tangent(at, d_constants)
    rhs = _vector.subtract(d_b, d_operator.matvec(at.x))
    if at.damp is None:
        return _undamped_tangent(at, d_operator, rhs)
    damp = at.damp
    if at.spec.damping == "nonzero":
        return damped_tangent(at, d_operator, rhs, damp, d_damp)

    def where(condition: Bool[Array, ""]) -> tuple[Solved, Vector]:
        zero = functools.partial(jax.tree.map, lambda leaf: jnp.where(condition, leaf, 0))
        return at._replace(b=zero(at.b), x=zero(at.x)), zero(rhs)

    # A traced λ may be zero. The rule that does not hold then gets zeros, of which its solves make
    # zero without an iteration. Not `jax.lax.cond`: it has no transpose under `vmap`.
    undamped, undamped_rhs = where(damp == 0)
    damped, damped_rhs = where(damp != 0)
    return _vector.add(
        _undamped_tangent(undamped, d_operator, undamped_rhs),
        damped_tangent(damped, d_operator, damped_rhs, damp, d_damp),
    )


def _undamped_tangent(at: Solved, d_operator: LinearOperator, rhs: Vector) -> Vector:
    # With the damping, if it is traced: where it is zero it changes nothing, and where it is not, a
    # solver that needs full rank or damping gets it.
    spec, operator = at.spec, at.spec.operator(at.constants)
    if not (spec.full_rank and spec.wide):  # else A x = b, and r is rounding
        q = d_operator.rmatvec(_vector.subtract(at.b, operator.matvec(at.x)))
        rhs = _vector.add(rhs, solve(spec.T, at.constants, q, at.damp)[0])
    if spec.full_rank and spec.tall:  # then A has no null space for x to turn into
        return solve(spec, at.constants, rhs, at.damp)[0]
    y, _ = solve(spec.T, at.constants, at.x, at.damp)
    v = d_operator.rmatvec(y)
    rhs = _vector.subtract(rhs, spec.push(at.constants, v))
    return _vector.add(solve(spec, at.constants, rhs, at.damp)[0], v)


def _operator_tangent(at: Solved, tangents: dict[int, Array]) -> LinearOperator:
    """dA, for the given tangents of the constants."""
    spec, constants = at.spec, at.constants

    def tangent_of(apply: Callable[[Sequence[Array], Vector], Vector]) -> Callable:
        def at_vector(vector: Vector) -> Vector:
            def apply_with(values: dict[int, Array]) -> Vector:
                return apply([values.get(i, c) for i, c in enumerate(constants)], vector)

            return jax.jvp(apply_with, ({i: constants[i] for i in tangents},), (tangents,))[1]

        return at_vector

    return LinearOperator(tangent_of(spec.apply), tangent_of(spec.T.apply), spec.columns, spec.rows)
