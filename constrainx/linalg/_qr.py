"""QR factorisation of A, written out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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
        if wide:
            y = jax.scipy.linalg.solve_triangular(r, _dense.flat(b, dtype), trans=1)
            both = jnp.matmul(q, y, precision="highest")
            x = _dense.unflat(both[:long], operator.columns)
        else:
            rhs = jnp.matmul(_dense.flat(b, dtype), q[:long], precision="highest")
            y = jax.scipy.linalg.solve_triangular(r, rhs)
            x = _dense.unflat(y, operator.columns)
        diagonal = jnp.diagonal(r)
        residual, normal = residuals(problem, x)
        info = direct_info(problem, x, diagonal, diagonal, residual, normal)

        if wide:
            hidden = problem.damp.astype(dtype) * both[long:]
            error = _minimum_norm_error(
                damped, q, r, y, both, _dense.flat(residual, dtype) - hidden
            )[:long]
        else:
            # One step of iterative refinement by RᵀR, the Gram matrix, says how far off x is.
            half = jax.scipy.linalg.solve_triangular(r, _dense.flat(normal, dtype), trans=1)
            error = jax.scipy.linalg.solve_triangular(r, half)
            # It is small by chance at times, where few directions are sensitive. So count in what
            # becomes of Aᵀr if each of its sums is off by a rounding error on its own.
            sums = jnp.linalg.norm(tall, axis=0) * _vector.norm(residual)
            rounding = 0.5 * jnp.finfo(dtype).eps * jnp.diag(sums)
            half = jax.scipy.linalg.solve_triangular(r, rounding, trans=1)
            error = jnp.append(error, jax.scipy.linalg.solve_triangular(r, half))
        return x, with_error(info, jnp.sum(jnp.square(error)), x)


def _minimum_norm_error(
    matrix: Float[Array, "tall short"],
    q: Float[Array, "tall short"],
    r: Float[Array, "short short"],
    y: Float[Array, " short"],
    solution: Float[Array, " tall"],
    left: Float[Array, " short"],
) -> Float[Array, " tall"]:
    """How far Q y is from the minimum-norm solution z of Mᵀz = b, which leaves ``left`` of b.

    To first order there are two parts. In the range of M it is what would solve Mᵀz = ``left``. The
    other is outside of that range, where no solution has a part: Q R = M + E with a rounding error
    E, so Q y is not M R⁻¹y, as it should be, but differs by E R⁻¹y.
    """
    dual = jax.scipy.linalg.solve_triangular(r, y)
    apart = solution - jnp.matmul(matrix, dual, precision="highest")
    within = jnp.matmul(apart, q, precision="highest")
    missing = jax.scipy.linalg.solve_triangular(r, left, trans=1)
    return apart - jnp.matmul(q, within + missing, precision="highest")
