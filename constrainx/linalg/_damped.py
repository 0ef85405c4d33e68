"""How a damped solution moves when A does, without dividing a difference by λ².

With H = AᵀA + λ²I and G = AAᵀ + λ²I, a damped solution moves by

    dx = H⁻¹Aᵀ(db − dA x) + H⁻¹dAᵀr − 2λ H⁻¹x dλ.

The first term is another damped solve. The second is the trouble. By the usual way,
H⁻¹q = (q − Aᵀs)/λ² with s the damped solution of Aᵀs ≈ q, it divides by λ² a difference that is in
error by the solver's tolerance; and r = b − A x, where A has full row rank, is nothing but such an
error. So neither is formed:

- **Tall A.** H⁻¹q is the z/λ of the minimum-norm solution of Aᵀs + λz = q. A solver leaves in it
  H⁻¹ times a residual, which is small against q: where A has full column rank, λ is in no
  denominator.
- **Wide A.** r = λ²y with G y = b, so that H⁻¹dAᵀr = λ²H⁻¹v = v − H⁻¹AᵀA v with v = dAᵀy, and one
  damped solve for db − dA x − A v gives all of dx − v. In the same way as above, y is the z/λ of
  the minimum-norm solution of A x + λz = b.

Where A has a null space on both sides, and b a part outside of its range, then y, w and dx are of
the order of 1/λ², and it is against this that their error is small.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def damped_tangent(
    at: Solved, d_operator: LinearOperator, rhs: Vector, damp: Scalar, d_damp: Scalar | None
) -> Vector:
    """The tangent dx for a damping that is not zero; ``rhs`` is db − dA x."""
    square = at.spec.tall and at.spec.wide
    # Either will do for a square A of full rank; without, the wide rule needs fewer digits.
    rule = _tall if at.spec.tall and (at.spec.full_rank or not square) else _wide
    return rule(at, d_operator, rhs, damp, d_damp)


def _tall(
    at: Solved, d_operator: LinearOperator, rhs: Vector, damp: Scalar, d_damp: Scalar | None
) -> Vector:
    q = d_operator.rmatvec(_residual(at, damp))
    if d_damp is not None and at.spec.full_rank:
        q = _vector.axpy(-2 * damp * d_damp, at.x, q)
    dx, _ = solve(at.spec, at.constants, rhs, damp)
    dx = _vector.add(dx, solve_normal(at.spec, at.constants, q, damp))
    if d_damp is None or at.spec.full_rank:
        return dx
    y = solve_normal(at.spec.T, at.constants, at.b, damp)
    return _vector.axpy(-2 * damp * d_damp, _solve_again(at, y, damp), dx)


def _residual(at: Solved, damp: Scalar) -> Vector:
    """The residual r = b − A x, with an error that is small relative to r itself, not only to b.

    Where r is small, the difference b − A x is mostly the solver's error, which matters if A does
    not have full rank. There r is computed as λ²y. Elsewhere that solve has a right-hand side of
    zero and ends at once.
    """
    spec, operator = at.spec, at.spec.operator(at.constants)
    residual = _vector.subtract(at.b, operator.matvec(at.x))
    if spec.full_rank:
        return residual
    small = _vector.norm(residual) < 0.1 * _vector.norm(at.b)
    b = _vector.where(small, at.b, _vector.zeros_like(at.b))
    y = solve_normal(spec.T, at.constants, b, damp)
    return _vector.where(small, _vector.scale(jnp.square(damp), y), residual)


def _wide(
    at: Solved, d_operator: LinearOperator, rhs: Vector, damp: Scalar, d_damp: Scalar | None
) -> Vector:
    spec = at.spec
    y = solve_normal(spec.T, at.constants, at.b, damp)
    v = d_operator.rmatvec(y)
    rhs = _vector.subtract(rhs, spec.push(at.constants, v))
    if d_damp is not None and spec.full_rank:  # H⁻¹x = H⁻¹Aᵀy
        rhs = _vector.axpy(-2 * damp * d_damp, y, rhs)
    dx = _vector.add(solve(spec, at.constants, rhs, damp)[0], v)
    if d_damp is None or spec.full_rank:
        return dx
    return _vector.axpy(-2 * damp * d_damp, _solve_again(at, y, damp), dx)


def _solve_again(at: Solved, y: Vector, damp: Scalar) -> Vector:
    """H⁻¹x, as H⁻¹Aᵀ of the part of y in A's range, and not of what rounding adds to x.

    That part moves on with A only as long as A keeps its rank, but H⁻¹x moves whatever A does, so
    its derivative is that of the solution w of H w = x.
    """
    constants, x, y, still = jax.lax.stop_gradient((list(at.constants), at.x, y, damp))
    part = _project_on_range(at._replace(constants=constants, x=x), y)
    w, _ = solve(at.spec, constants, part, still)
    left = _vector.subtract(at.x, _apply_normal(at.spec, at.constants, w, damp))
    nothing = _vector.subtract(left, jax.lax.stop_gradient(left))  # but for its derivative
    return _vector.add(w, solve_normal(at.spec, at.constants, nothing, damp))


def _project_on_range(at: Solved, y: Vector) -> Vector:
    """The part of y in A's range. Aᵀ maps the rest, which may be large, to zero.

    It is the minimum-norm solution of Aᵀy = x. If a solver that needs full rank fails at that, all
    of y is returned.
    """
    within, info = solve(at.spec.undamped.T, at.constants, at.x)
    return _vector.where(info.converged, within, y)


def _apply_normal(spec: Spec, constants: Sequence[Array], w: Vector, damp: Scalar) -> Vector:
    operator = spec.operator(constants)
    return _vector.axpy(jnp.square(damp), w, operator.rmatvec(operator.matvec(w)))


def solve_normal(spec: Spec, constants: Sequence[Array], q: Vector, damp: Scalar) -> Vector:
    """H⁻¹q = z/λ, with z from the minimum-norm solution (s, z) of Aᵀs + λz = q.

    `jax.lax.custom_linear_solve` differentiates this as the solution of H w = q. Without
    it, the quotient z/λ would have to be differentiated with respect to λ.
    """
    operator = spec.operator(constants)

    def normal(w: Vector) -> Vector:
        return _apply_normal(spec, constants, w, damp)

    def minimum_norm(_: object, q: Vector) -> Vector:
        (s, z), _ = solve(spec.augmented.T, [*constants, damp], q)
        w = _vector.scale(_vector.reciprocal(damp), z)
        if spec.full_rank:
            return w
        left = _vector.axpy(-damp, z, _vector.subtract(q, operator.rmatvec(s)))
        unseen = _keep_null_space(spec, constants, left, _vector.norm(q), damp)
        return _vector.axpy(jnp.square(_vector.reciprocal(damp)), unseen, w)

    return jax.lax.custom_linear_solve(normal, q, minimum_norm, symmetric=True)


def _keep_null_space(
    spec: Spec, constants: Sequence[Array], left: Vector, size: Scalar, damp: Scalar
) -> Vector:
    """What a solver left of a right-hand side of this size, if it is in A's null space; else zero.

    On A's null space H is λ², and a solver whose tolerance or limit on the condition number is
    above λ stops before it has seen the part of q that lies there. What it leaves is then all of
    that part, and λ²H⁻¹, which is the identity there, changes nothing about it. It takes away what
    is only the solver's error.
    """
    norm = _vector.norm(left)
    zero = _vector.zeros_like(left)
    left = _vector.where(norm > 100 * jnp.finfo(norm.dtype).eps * size, left, zero)
    s, _ = solve(spec.T, constants, left, damp)
    filtered = _vector.subtract(left, spec.operator(constants).rmatvec(s))
    return _vector.where(_vector.norm(filtered) > 0.5 * norm, filtered, zero)
