"""CG on the normal equations, in the form that never multiplies by AᵀA."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from constrainx.linalg import _vector
from constrainx.linalg._info import Info, Reason
from constrainx.linalg._problem import LeastSquares
from constrainx.linalg._validate import check_at_least, check_iterations
from constrainx.linalg._vector import Scalar, Vector


@dataclasses.dataclass(frozen=True)
class CG:
    """Conjugate gradients on (AᵀA + λ²I) x = Aᵀb (Hestenes and Stiefel, 1952; known as CGLS).

    Fewer vectors than `LSMR`, and as fast where A is well-conditioned. Its error grows with the
    square of the condition number, so prefer `LSMR` in float32.

    Attributes:
        rtol: stop at ‖Aᵀr − λ²x‖ ≤ rtol ‖Aᵀb‖.
        max_iterations: defaults to ten times the smaller side of A.
    """

    rtol: float = 1e-6
    max_iterations: int | None = None

    def __post_init__(self) -> None:
        check_at_least("CG", "rtol", self.rtol, 0.0)
        check_iterations("CG", self.max_iterations)

    def solve(self, problem: LeastSquares) -> tuple[Vector, Info]:
        """Solves the problem, see `lstsq`."""
        operator, b = problem.operator, problem.b
        dtype = _vector.scalar_dtype(operator.rows, operator.columns)
        damp_squared = jnp.square(problem.damp.astype(dtype))
        limit = self.max_iterations
        if limit is None:
            limit = 10 * min(operator.shape)

        gradient = operator.rmatvec(b)
        squared = _vector.dot(gradient, gradient)
        # Relative to Aᵀb as the user gave it: a solve from an `x0` has less to do.
        goal = self.rtol**2 * squared * _relative(problem.b_norm.astype(dtype), _vector.norm(b))

        def body(state: _State) -> _State:
            image = operator.matvec(state.direction)
            curvature = _vector.dot(image, image)
            curvature += damp_squared * _vector.dot(state.direction, state.direction)
            step = state.squared / curvature
            fine = jnp.isfinite(step) & (curvature > 0)
            x = _vector.axpy(jnp.where(fine, step, 0), state.direction, state.x)
            residual = _vector.axpy(-step, image, state.residual)
            gradient = _vector.axpy(-damp_squared, x, operator.rmatvec(residual))
            squared = _vector.dot(gradient, gradient)
            fine &= jnp.isfinite(squared)
            return _State(
                iteration=state.iteration + 1,
                x=x,
                residual=residual,
                direction=_vector.axpy(squared / state.squared, state.direction, gradient),
                squared=squared,
                reason=_reason(fine, squared <= goal),
            )

        first = _State(
            iteration=jnp.zeros((), jnp.int32),
            x=_vector.zeros_like(operator.columns),
            residual=b,
            direction=gradient,
            squared=squared,
            reason=jnp.where(
                squared == 0, Reason.TRIVIAL, _reason(jnp.isfinite(squared), squared <= goal)
            ).astype(jnp.int32),
        )
        last = jax.lax.while_loop(
            lambda s: (s.reason == _GO_ON) & (s.iteration < limit), body, first
        )
        reason = jnp.where(last.reason == _GO_ON, Reason.MAX_ITERATIONS, last.reason)
        damped = damp_squared * _vector.dot(last.x, last.x)
        return last.x, Info(
            converged=reason <= Reason.LEAST_SQUARES,
            reason=reason,
            iterations=last.iteration,
            residual_norm=jnp.sqrt(_vector.dot(last.residual, last.residual) + damped),
            normal_residual_norm=jnp.sqrt(last.squared),
            condition=jnp.full((), jnp.nan, dtype),  # CG does not estimate it
        )


_GO_ON = -1


class _State(NamedTuple):
    iteration: Int[Array, ""]
    x: Vector
    residual: Vector
    direction: Vector
    squared: Scalar
    reason: Int[Array, ""]


def _reason(finite: Bool[Array, ""], small: Bool[Array, ""]) -> Int[Array, ""]:
    stop = jnp.where(small, Reason.LEAST_SQUARES, _GO_ON)
    return jnp.where(finite, stop, Reason.NOT_FINITE).astype(jnp.int32)


def _relative(reference: Scalar, norm: Scalar) -> Scalar:
    """How much looser the tolerance is, squared."""
    return jnp.square(jnp.where(norm > 0, jnp.maximum(reference / norm, 1), 1))
