"""QR factorisation of A, written out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from constrainx.linalg import _dense, _vector
from constrainx.linalg._cholesky import direct_info, residuals
from constrainx.linalg._info import Info
from constrainx.linalg._problem import LeastSquares
from constrainx.linalg._vector import Vector


@dataclasses.dataclass(frozen=True)
class QR:
    """Solves by a Householder QR factorisation of A, or of Aᵀ if A is wide.

    As accurate as least squares gets for an A of full rank, at the price of the whole matrix in one
    piece. For small problems and as a reference. Without full rank or damping it reports
    `Reason.RANK`.
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
        return x, direct_info(problem, x, diagonal, diagonal, *residuals(problem, x))
