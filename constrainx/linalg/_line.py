"""One row or one column: LSMR would end after one iteration, and this is what it would find."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from constrainx.linalg import _vector
from constrainx.linalg._info import Info, Reason
from constrainx.linalg._problem import LeastSquares
from constrainx.linalg._vector import Scalar, Vector


def solve_on_a_line(problem: LeastSquares) -> tuple[Vector, Info]:
    """The closed form x = α β v / (α² + λ²) with α v = Aᵀu and β u the part of b in A's range.

    One row is a scalar constraint on all parameters of a network, where a pass over memory is what
    counts: this takes one product with A or Aᵀ and no loop.
    """
    operator, b = problem.operator, problem.b
    dtype = _vector.scalar_dtype(operator.rows, operator.columns)
    damp = jnp.abs(problem.damp.astype(dtype))
    b_norm = _vector.safe_norm(b)
    if operator.shape[0] == 1:
        beta, outside = b_norm, jnp.zeros((), dtype)
        image = operator.rmatvec(_vector.scale(_vector.reciprocal(beta), b))
        alpha = _robust_norm(image)
        direction = _vector.scale(_vector.reciprocal(alpha), image)
    else:
        unit = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), operator.columns)
        image = operator.matvec(unit)
        alpha = _robust_norm(image)
        normal = _vector.scale(_vector.reciprocal(alpha), image)
        beta = _vector.dot(normal, b)
        direction = unit
        outside = _robust_norm(_vector.axpy(-beta, normal, b))

    # α / (α² + λ²), arranged so that squares neither overflow nor vanish.
    larger = jnp.maximum(alpha, damp)
    ratio = jnp.square(alpha * _vector.reciprocal(larger)) + jnp.square(
        damp * _vector.reciprocal(larger)
    )
    inverse = (
        alpha * _vector.reciprocal(larger) * _vector.reciprocal(larger) * _vector.reciprocal(ratio)
    )
    length = beta * inverse
    x = _vector.scale(length, direction)

    finite = jnp.isfinite(alpha) & jnp.isfinite(b_norm) & jnp.isfinite(damp) & jnp.isfinite(length)
    trivial = (alpha == 0) | (beta == 0)
    inside = beta - alpha * length
    residual = jnp.hypot(jnp.hypot(inside, outside), damp * length)
    solved = jnp.where(
        trivial,
        Reason.TRIVIAL,
        jnp.where(residual <= 1e-6 * b_norm, Reason.RESIDUAL, Reason.LEAST_SQUARES),
    )
    reason = jnp.where(finite, solved, Reason.NOT_FINITE).astype(jnp.int32)
    return _vector.where(finite, x, _vector.zeros_like(x)), Info(
        converged=finite,
        reason=reason,
        iterations=jnp.where(finite & ~trivial, 1, 0).astype(jnp.int32),
        residual_norm=residual,
        normal_residual_norm=jnp.abs(alpha * inside - jnp.square(damp) * length),
        condition=jnp.ones((), dtype),
    )


def _robust_norm(vector: Vector) -> Scalar:
    """The norm, with a second look where squares may have overflowed or vanished."""
    norm = _vector.norm(vector)
    limits = jnp.finfo(norm.dtype)
    low, high = float(limits.tiny) ** 0.5 / float(limits.eps), float(limits.max) ** 0.5 / 2
    return jax.lax.cond(
        (norm > low) & (norm < high), lambda: norm, lambda: _vector.safe_norm(vector)
    )
