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

    Fewer vectors than `LSMR`, and in practice as accurate. But it does not estimate the condition
    number, its ‖Aᵀr‖ does not fall steadily, so that it is harder to stop well, and it does not
    rescale: squares of ‖A d‖ must stay within the range of the dtype.

    Attributes:
        rtol: stop at ‖r‖ ≤ rtol ‖b‖ or ‖Aᵀr − λ²x‖ ≤ rtol ‖A‖‖r‖, with ‖A‖ estimated from below.
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

        def body(state: _State) -> _State:
            image = operator.matvec(state.direction)
            length = _vector.dot(state.direction, state.direction)
            curvature = _vector.dot(image, image) + damp_squared * length
            step = state.squared / curvature
            # An overflow in the curvature would pass for a step of zero.
            finite = jnp.isfinite(step) & jnp.isfinite(curvature)
            x = _vector.axpy(step, state.direction, state.x)
            residual = _vector.axpy(-step, image, state.residual)
            residual_squared = _vector.dot(residual, residual)
            residual_squared += damp_squared * _vector.dot(x, x)
            # It only falls, until rounding has the better of it.
            worse = ~(residual_squared <= 1.01 * state.residual_squared)
            gradient = _vector.axpy(-damp_squared, x, operator.rmatvec(residual))
            squared = _vector.dot(gradient, gradient)
            new = _State(
                iteration=state.iteration + 1,
                x=_vector.where(worse, state.x, x),
                residual=_vector.where(worse, state.residual, residual),
                residual_squared=jnp.where(worse, state.residual_squared, residual_squared),
                direction=_vector.axpy(squared / state.squared, state.direction, gradient),
                squared=squared,
                operator_norm_squared=jnp.maximum(state.operator_norm_squared, curvature / length),
                reason=state.reason,
            )
            stop = self._why_stop(problem, new, finite)
            return new._replace(reason=jnp.where(worse & (stop == _GO_ON), Reason.CONDITION, stop))

        gradient = operator.rmatvec(b)
        squared, residual_squared = _vector.dot(gradient, gradient), _vector.dot(b, b)
        first = _State(
            iteration=jnp.zeros((), jnp.int32),
            x=_vector.zeros_like(operator.columns),
            residual=b,
            residual_squared=residual_squared,
            direction=gradient,
            squared=squared,
            operator_norm_squared=squared / jnp.where(squared > 0, residual_squared, 1),
            reason=jnp.full((), _GO_ON, jnp.int32),
        )
        stop = self._why_stop(problem, first, jnp.isfinite(problem.damp))
        first = first._replace(reason=jnp.where(squared == 0, Reason.TRIVIAL, stop))
        last = jax.lax.while_loop(
            lambda s: (s.reason == _GO_ON) & (s.iteration < limit), body, first
        )
        reason = jnp.where(last.reason == _GO_ON, Reason.MAX_ITERATIONS, last.reason)
        return last.x, Info(
            converged=reason <= Reason.LEAST_SQUARES,
            reason=reason,
            iterations=last.iteration,
            residual_norm=jnp.sqrt(last.residual_squared),
            normal_residual_norm=jnp.sqrt(last.squared),
            condition=jnp.full((), jnp.nan, dtype),  # CG does not estimate it
        )

    def _why_stop(
        self, problem: LeastSquares, state: _State, finite: Bool[Array, ""]
    ) -> Int[Array, ""]:
        b_norm = problem.b_norm.astype(state.squared.dtype)
        bound = state.operator_norm_squared * state.residual_squared
        conditions = {
            Reason.NOT_FINITE: ~(finite & jnp.isfinite(state.squared)),
            Reason.RESIDUAL: state.residual_squared <= jnp.square(self.rtol * b_norm),
            Reason.LEAST_SQUARES: state.squared <= self.rtol**2 * bound,
        }
        return jnp.select(list(conditions.values()), list(conditions), _GO_ON).astype(jnp.int32)


_GO_ON = -1


class _State(NamedTuple):
    iteration: Int[Array, ""]
    x: Vector
    residual: Vector
    residual_squared: Scalar
    direction: Vector
    squared: Scalar
    operator_norm_squared: Scalar
    reason: Int[Array, ""]
