"""The closed form for one row or one column, which LSMR would find in one iteration."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from constrainx.linalg import _vector
from constrainx.linalg._info import Info, Reason
from constrainx.linalg._problem import LeastSquares
from constrainx.linalg._vector import Scalar, Vector


def solve_on_a_line(problem: LeastSquares) -> tuple[Vector, Info]:
    """The closed form x = α β v / (α² + λ²) with α v = Aᵀu and β u the part of b in A's range.

    One row is a scalar constraint on all parameters of a network, where the time goes into
    passes over memory: this takes one product with A or Aᵀ and no loop.
    """
    operator, b = problem.operator, problem.b
    dtype = _vector.scalar_dtype(operator.rows, operator.columns)
    damp = jnp.abs(problem.damp.astype(dtype))
    b_norm = _vector.safe_norm(b)
    row = operator.shape[0] == 1
    if row:
        image = operator.rmatvec(_vector.scale(_vector.reciprocal(b_norm), b))
    else:
        unit = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), operator.columns)
        image = operator.matvec(unit)

    # By powers of two, so that squares neither overflow nor vanish.
    alpha = _robust_norm(image)
    scale = _vector.power_of_two(jnp.maximum(alpha, damp))
    image = _vector.scale(scale, image)
    # The barrier keeps XLA from multiplying α² by the square of the scale instead.
    length_of_row, scaled_damp = jax.lax.optimization_barrier((alpha * scale, damp * scale))
    squares = jnp.square(length_of_row) + jnp.square(scaled_damp)
    inverse = scale * _vector.reciprocal(squares)
    if row:
        beta, outside = b_norm, jnp.zeros((), dtype)
        x = _vector.scale(beta * inverse, image)
    else:
        beta = _vector.dot(image, b) * _vector.reciprocal(length_of_row)
        x = _vector.scale(_vector.dot(image, b) * inverse, unit)
        normal = _vector.scale(beta * _vector.reciprocal(length_of_row), image)
        outside = _robust_norm(_vector.subtract(b, normal))
    length = beta * (length_of_row) * inverse

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
    """The norm, computed again with scaling where squares may have overflowed or vanished."""
    norm = _vector.norm(vector)
    limits = jnp.finfo(norm.dtype)
    low, high = float(limits.tiny) ** 0.5 / float(limits.eps), float(limits.max) ** 0.5 / 2
    return jax.lax.cond(
        (norm > low) & (norm < high), lambda: norm, lambda: _vector.safe_norm(vector)
    )
