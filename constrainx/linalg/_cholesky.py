"""Cholesky factorisation of the Gram matrix of A's shorter side."""

from __future__ import annotations

import dataclasses
import functools
import operator as op

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from constrainx.linalg import _dense, _vector
from constrainx.linalg._info import Info, Reason
from constrainx.linalg._problem import LeastSquares
from constrainx.linalg._vector import Scalar, Vector


@dataclasses.dataclass(frozen=True)
class Cholesky:
    """Solves the normal equations of the shorter side by a Cholesky factorisation.

    For k = min(rows, columns), takes k products with A or Aᵀ in one batch, and the memory of k
    vectors of the long side. The fastest solver for a few rows or columns. It squares the condition
    number, so A should be conditioned better than about 500 in float32 and 1e7 in float64, or it
    reports `Reason.CONDITION`; and needs full rank or damping, or it reports `Reason.RANK`.
    """

    def solve(self, problem: LeastSquares) -> tuple[Vector, Info]:
        """Solves the problem, see `lstsq`."""
        operator, b = problem.operator, problem.b
        dtype = _vector.scalar_dtype(operator.rows, operator.columns)
        wide, stacked = _dense.short_side(operator)
        gram = _inner_products(stacked, stacked, dtype)
        gram += jnp.square(problem.damp.astype(dtype)) * jnp.eye(len(gram), dtype=dtype)
        factor = jnp.linalg.cholesky(gram)
        if wide:
            y = jax.scipy.linalg.cho_solve((factor, True), _dense.flat(b, dtype))
            x = _dense.combine(y, stacked)
        else:
            rhs = _inner_products(stacked, jax.tree.map(lambda leaf: leaf[None], b), dtype)[:, 0]
            y = jax.scipy.linalg.cho_solve((factor, True), rhs)
            x = _dense.unflat(y, operator.columns)
        # Squared, the diagonal is the pivots that the elimination of the Gram matrix met.
        diagonal = jnp.diagonal(factor)
        residual, normal = residuals(problem, x)
        info = direct_info(problem, x, diagonal, jnp.square(diagonal), residual, normal)

        # One step of iterative refinement says how far off x is.
        damp_squared = jnp.square(problem.damp.astype(dtype))
        left = (
            _dense.flat(residual, dtype) - damp_squared * y if wide else _dense.flat(normal, dtype)
        )
        correction = jax.scipy.linalg.cho_solve((factor, True), left)
        if wide:
            # Not as a quadratic form of the Gram matrix, which rounding makes negative.
            moved = _dense.combine(correction, stacked)
        else:
            moved = _dense.unflat(correction, operator.columns)
        squared = _vector.dot(moved, moved)
        # But not where the smallest eigenvalue is hardly more than the rounding errors of the Gram
        # matrix: then x and its correction lack the same part. Frobenius norms grow with k, as
        # those errors do.
        identity = jnp.eye(len(gram), dtype=dtype)
        inverse = jax.scipy.linalg.solve_triangular(factor, identity, lower=True)
        rounding = jnp.finfo(dtype).eps * jnp.linalg.norm(gram)
        known = 10 * rounding * jnp.sum(jnp.square(inverse)) < 1
        squared = jnp.where(known, squared, jnp.inf)
        return x, with_error(info, squared, x)


# Of x, relative, by its estimate, which rounding makes uncertain by a factor of two or three: an x
# that is 1 % off does not pass for solved.
_LARGEST_ERROR = 3e-3


def residuals(problem: LeastSquares, x: Vector) -> tuple[Vector, Vector]:
    """Both b − A x and Aᵀ(b − A x) − λ²x."""
    residual = _vector.subtract(problem.b, problem.operator.matvec(x))
    normal = problem.operator.rmatvec(residual)
    return residual, _vector.axpy(-jnp.square(problem.damp), x, normal)


def with_error(info: Info, squared: Scalar, x: Vector) -> Info:
    """The same report, but not converged if the error of x, squared, is estimated to be large."""
    inaccurate = info.converged & ~(squared <= _LARGEST_ERROR**2 * _vector.dot(x, x))
    return info._replace(
        converged=info.converged & ~inaccurate,
        reason=jnp.where(inaccurate, Reason.CONDITION, info.reason),
    )


def direct_info(
    problem: LeastSquares,
    x: Vector,
    diagonal: Float[Array, " k"],
    pivots: Float[Array, " k"],
    residual: Vector,
    normal: Vector,
) -> Info:
    """What a direct solver knows: whether the pivots were regular, and the residuals.

    The diagonal of a triangular factor of A bounds the condition number from below.
    """
    dtype = diagonal.dtype
    diagonal, pivots = jnp.abs(diagonal), jnp.abs(pivots)
    # NaN, where Cholesky gave up, compares false.
    regular = jnp.min(pivots) > len(pivots) * jnp.finfo(dtype).eps * jnp.max(pivots)

    damp = problem.damp.astype(dtype)
    finite = jnp.isfinite(problem.b_norm) & jnp.isfinite(damp)
    solved = jnp.isfinite(_vector.norm(x)) & regular
    reason = jnp.where(
        finite & ~jnp.isinf(jnp.max(diagonal)),
        jnp.where(solved, Reason.LEAST_SQUARES, Reason.RANK),
        Reason.NOT_FINITE,
    )
    return Info(
        converged=reason <= Reason.LEAST_SQUARES,
        reason=reason,
        iterations=jnp.ones((), jnp.int32),
        residual_norm=jnp.hypot(_vector.norm(residual), damp * _vector.norm(x)),
        normal_residual_norm=_vector.norm(normal),
        condition=jnp.max(diagonal) / jnp.min(diagonal),
    )


def _inner_products(
    left: _dense.Stacked, right: PyTree[Float[Array, "other ..."]], dtype: jnp.dtype
) -> Float[Array, "short other"]:
    def of_leaf(a: Array, b: Array) -> Array:
        axes = tuple(range(1, a.ndim))
        return jnp.tensordot(a.astype(dtype), b.astype(dtype), (axes, axes), precision="highest")

    return functools.reduce(op.add, jax.tree.leaves(jax.tree.map(of_leaf, left, right)))
