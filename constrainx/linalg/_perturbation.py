"""How the least-squares solution moves when A, b or the damping λ do.

With r = b − A x the minimum-norm solution moves, at constant rank and without damping, by
(Golub and Pereyra, 1973)

    dx = A⁺(db − dA x) + (AᵀA)⁺ dAᵀ r + (I − A⁺A) dAᵀ y,    y = (Aᵀ)⁺ x,

which takes two solves that are linear in the tangents, and y, which is not a tangent at all:

    s = (Aᵀ)⁺ dAᵀ r,    v = dAᵀ y,    dx = v + A⁺(db − dA x + s − A v).

With damping and H = AᵀA + λ²I,

    dx = H⁻¹Aᵀ(db − dA x) + H⁻¹q,    q = dAᵀ r − 2λ x dλ.

H⁻¹q needs care. With s = (AAᵀ + λ²I)⁻¹A q it is (q − Aᵀs)/λ², all cancellation where λ is small,
and r itself is all rounding where A has full row rank. Tall and wide A need different remedies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from constrainx.linalg import _vector
from constrainx.linalg._operator import LinearOperator
from constrainx.linalg._primitive import solve
from constrainx.linalg._spec import Spec
from constrainx.linalg._vector import Scalar, Vector


class Solved(NamedTuple):
    """A solved problem; ``spec`` and ``constants`` are A, and ``damp`` is None without damping."""

    spec: Spec
    constants: Sequence[Array]
    b: Vector
    damp: Scalar | None
    x: Vector


def solution_tangent(
    at: Solved, d_constants: dict[int, Array], d_b: Vector, d_damp: Scalar | None
) -> Vector:
    """dx, where a constant that is not in ``d_constants`` stays put, and so does a damp of None."""
    if not d_constants and d_damp is None:
        return solve(at.spec, at.constants, d_b, at.damp)[0]
    d_operator = _operator_tangent(at, d_constants)
    rhs = _vector.subtract(d_b, d_operator.matvec(at.x))
    if at.damp is None:
        return _undamped(at, d_operator, rhs)
    if at.spec.tall:
        return _damped_tall(at, d_operator, rhs, at.damp, d_damp)
    return _damped_wide(at, d_operator, rhs, at.damp, d_damp)


def _undamped(at: Solved, d_operator: LinearOperator, rhs: Vector) -> Vector:
    spec, operator = at.spec, at.spec.operator(at.constants)
    if not (spec.full_rank and spec.wide):  # else A x = b, and r is rounding
        residual = _vector.subtract(at.b, operator.matvec(at.x))
        rhs = _vector.add(rhs, solve(spec.T, at.constants, d_operator.rmatvec(residual))[0])
    if spec.full_rank and spec.tall:  # then A has no null space for x to turn into
        return solve(spec, at.constants, rhs)[0]
    y, _ = solve(spec.T, at.constants, at.x)
    v = d_operator.rmatvec(y)
    dx, _ = solve(spec, at.constants, _vector.subtract(rhs, operator.matvec(v)))
    return _vector.add(dx, v)


def _damped_tall(
    at: Solved, d_operator: LinearOperator, rhs: Vector, damp: Scalar, d_damp: Scalar | None
) -> Vector:
    """H⁻¹q = [A; λI]⁺(s, t) with t = (q − Aᵀs)/λ.

    The difference in t is in error by about the solver's tolerance ε, of which this leaves ε²/λ in
    the solution; (q − Aᵀs)/λ² and a refinement would leave ε²/λ².
    """
    spec, operator = at.spec, at.spec.operator(at.constants)
    residual = _vector.subtract(at.b, operator.matvec(at.x))
    q = d_operator.rmatvec(residual)
    if d_damp is not None:
        q = _vector.axpy(-2 * damp * d_damp, at.x, q)
    s, _ = solve(spec.T, at.constants, q, damp)
    t = _vector.scale(_vector.reciprocal(damp), _vector.subtract(q, operator.rmatvec(s)))
    rhs = _vector.add(rhs, s)
    if spec.damping == "nonzero" or spec.full_rank:
        return solve(spec.augmented, [*at.constants, damp], (rhs, t))[0]
    # A traced λ may be zero, and then it is the undamped rule that holds, with its y. If λ is not
    # zero, that solve has a right-hand side of zero and ends at once.
    x_if_undamped = _vector.where(damp == 0, at.x, _vector.zeros_like(at.x))
    y, _ = solve(spec.undamped.T, at.constants, x_if_undamped)
    v = d_operator.rmatvec(y)
    rhs = _vector.subtract(rhs, operator.matvec(v))
    dx, _ = solve(spec.augmented, [*at.constants, damp], (rhs, t))
    return _vector.add(dx, v)


def _damped_wide(
    at: Solved, d_operator: LinearOperator, rhs: Vector, damp: Scalar, d_damp: Scalar | None
) -> Vector:
    """The undamped rule with damped solves, for r = λ²y + r⊥ where r⊥ is orthogonal to A's range.

    H⁻¹λ²v = v − H⁻¹AᵀA v turns the part of r in the range, which is of the order of λ² and drowns
    in rounding, into the v of the undamped rule. What is left, H⁻¹dAᵀr⊥, is zero if A has full row
    rank, and as large as 1/λ² if it has not.
    """
    spec, operator = at.spec, at.spec.operator(at.constants)
    y, _ = solve(spec.undamped.T, at.constants, at.x)
    v = d_operator.rmatvec(y)
    if d_damp is not None:  # H⁻¹x = H⁻¹Aᵀy
        rhs = _vector.axpy(-2 * damp * d_damp, y, rhs)
    if not spec.full_rank:
        residual = _vector.subtract(at.b, operator.matvec(at.x))
        outside = _vector.axpy(-jnp.square(damp), y, residual)
        # 1/λ² would make rounding look like a lack of rank.
        noise = 100 * jnp.finfo(damp.dtype).eps * _vector.norm(at.b)
        outside = _vector.where(
            (damp != 0) & (_vector.norm(outside) <= noise), _vector.zeros_like(outside), outside
        )
        q = d_operator.rmatvec(outside)
        s, _ = solve(spec.T, at.constants, q, damp)
        gap = _vector.subtract(q, operator.rmatvec(s))
        v = _vector.axpy(jnp.square(_vector.reciprocal(damp)), gap, v)
        rhs = _vector.add(rhs, s)
    dx, _ = solve(spec, at.constants, _vector.subtract(rhs, operator.matvec(v)), damp)
    return _vector.add(dx, v)


def _operator_tangent(at: Solved, tangents: dict[int, Array]) -> LinearOperator:
    """dA, for the given tangents of the constants."""
    spec, constants = at.spec, at.constants

    def tangent_of(apply: Callable[[Sequence[Array], Vector], Vector]) -> Callable:
        def at_vector(vector: Vector) -> Vector:
            def moved(values: dict[int, Array]) -> Vector:
                return apply([values.get(i, c) for i, c in enumerate(constants)], vector)

            return jax.jvp(moved, ({i: constants[i] for i in tangents},), (tangents,))[1]

        return at_vector

    return LinearOperator(tangent_of(spec.apply), tangent_of(spec.T.apply), spec.columns, spec.rows)
