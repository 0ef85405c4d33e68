"""QR factorisation of A, written out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from constrainx.linalg import _dense, _vector
from constrainx.linalg._cholesky import direct_info, residuals, with_error
from constrainx.linalg._info import Info
from constrainx.linalg._problem import LeastSquares
from constrainx.linalg._vector import Vector


@dataclasses.dataclass(frozen=True)
class QR:
    """Solves by a Householder QR factorisation of A, or of Aᵀ if A is wide.

    As accurate as least squares gets for an A of full rank, at the price of the whole matrix in one
    piece. For small problems and as a reference. Without full rank or damping it reports
    `Reason.RANK`, and where it estimates x to be far off, as with a damping so small that rounding
    hides it, `Reason.CONDITION`.
    """

    def solve(self, problem: LeastSquares) -> tuple[Vector, Info]:
        """Solves the problem, see `lstsq`."""
        operator, b = problem.operator, problem.b
        dtype = _vector.scalar_dtype(operator.rows, operator.columns)
        wide, stacked = _dense.short_side(operator)
        tall = jax.vmap(lambda vector: _dense.flat(vector, dtype))(stacked).T
        long, short = tall.shape
        # The rows λI do nothing if λ is zero, and λ may be traced.
        damped = jnp.concatenate([tall, problem.damp.astype(dtype) * jnp.eye(short, dtype=dtype)])
        q, r = jnp.linalg.qr(damped)
        q = q[:long]
        if wide:
            y = jax.scipy.linalg.solve_triangular(r, _dense.flat(b, dtype), trans=1)
            x = _dense.unflat(jnp.matmul(q, y, precision="highest"), operator.columns)
        else:
            rhs = jnp.matmul(_dense.flat(b, dtype), q, precision="highest")
            y = jax.scipy.linalg.solve_triangular(r, rhs)
            x = _dense.unflat(y, operator.columns)
        diagonal = jnp.diagonal(r)
        residual, normal = residuals(problem, x)
        info = direct_info(problem, x, diagonal, diagonal, residual, normal)

        if wide:
            # y is the whole of (x, r/λ), and rounding in it, amplified, is spread over both parts.
            error = _TYPICAL * jnp.finfo(dtype).eps * info.condition
            return x, with_error(info, jnp.square(error) * jnp.sum(jnp.square(y)), x)
        # One step of iterative refinement by RᵀR, the Gram matrix, says how far off x is.
        half = jax.scipy.linalg.solve_triangular(r, _dense.flat(normal, dtype), trans=1)
        correction = jax.scipy.linalg.solve_triangular(r, half)
        return x, with_error(info, jnp.sum(jnp.square(correction)), x)


# How large rounding errors are, against the bound for the worst case.
_TYPICAL = 0.1
