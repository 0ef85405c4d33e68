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

    Once rounding keeps ‖Aᵀr − λ²x‖ from falling further, it stops and returns the best iterate.

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
            step = state.last.squared / curvature
            # An overflow in the curvature would pass for a step of zero.
            finite = jnp.isfinite(step) & jnp.isfinite(curvature)
            x = _vector.axpy(jnp.where(finite, step, 0), state.direction, state.last.x)
            residual = _vector.axpy(-step, image, state.residual)
            residual_squared = _vector.dot(residual, residual)
            residual_squared += damp_squared * _vector.dot(x, x)
            gradient = _vector.axpy(-damp_squared, x, operator.rmatvec(residual))
            squared = _vector.dot(gradient, gradient)
            last = _Iterate(x, residual_squared, squared)
            better = squared < state.best.squared
            new = _State(
                iteration=state.iteration + 1,
                last=last,
                best=_vector.where(better, last, state.best),
                since_best=jnp.where(better, 0, state.since_best + 1),
                residual=residual,
                direction=_vector.axpy(squared / state.last.squared, state.direction, gradient),
                operator_norm_squared=jnp.maximum(state.operator_norm_squared, curvature / length),
                reason=state.reason,
                stagnant=state.stagnant,
            )
            # ‖r‖ only falls, until rounding has the better of it.
            worse = ~(residual_squared <= 1.01 * state.last.residual_squared)
            return self._check_stop(problem, new, finite, worse)

        gradient = operator.rmatvec(b)
        start = _Iterate(
            x=_vector.zeros_like(operator.columns),
            residual_squared=_vector.dot(b, b),
            squared=_vector.dot(gradient, gradient),
        )
        norm_squared = start.squared / jnp.where(start.squared > 0, start.residual_squared, 1)
        first = _State(
            iteration=jnp.zeros((), jnp.int32),
            last=start,
            best=start,
            since_best=jnp.zeros((), jnp.int32),
            residual=b,
            direction=gradient,
            operator_norm_squared=norm_squared,
            reason=jnp.full((), _GO_ON, jnp.int32),
            stagnant=jnp.zeros((), bool),
        )
        never = jnp.zeros((), bool)
        first = self._check_stop(problem, first, jnp.isfinite(problem.damp), never)
        reason = jnp.where(start.squared == 0, Reason.TRIVIAL, first.reason)
        first = first._replace(reason=reason.astype(jnp.int32))
        end = jax.lax.while_loop(
            lambda s: (s.reason == _GO_ON) & (s.iteration < limit), body, first
        )
        reason = jnp.where(end.reason == _GO_ON, Reason.MAX_ITERATIONS, end.reason)
        found = _vector.where(end.stagnant | _is_idle(end), end.best, end.last)
        return found.x, Info(
            converged=reason <= Reason.LEAST_SQUARES,
            reason=reason,
            iterations=end.iteration,
            residual_norm=jnp.sqrt(found.residual_squared),
            normal_residual_norm=jnp.sqrt(found.squared),
            condition=jnp.full((), jnp.nan, dtype),  # CG does not estimate it
        )

    def _check_stop(
        self, problem: LeastSquares, state: _State, finite: Bool[Array, ""], worse: Bool[Array, ""]
    ) -> _State:
        """The same state, with a reason to stop if there is one."""
        last, best = state.last, state.best
        # No residual is known better than to the precision of the arithmetic.
        precision = float(jnp.finfo(last.squared.dtype).eps)
        rtol = max(self.rtol, precision)
        b_norm = problem.b_norm.astype(last.squared.dtype)
        relative = last.squared / (state.operator_norm_squared * last.residual_squared)
        best_relative = best.squared / (state.operator_norm_squared * best.residual_squared)
        # Far above the precision, ‖Aᵀr‖ may rise for long and fall again.
        idle = _is_idle(state) & (best_relative <= (100 * precision) ** 2)
        stagnant = worse | idle
        conditions = {
            Reason.NOT_FINITE: ~(finite & jnp.isfinite(last.squared)),
            Reason.RESIDUAL: last.residual_squared <= jnp.square(rtol * b_norm),
            Reason.LEAST_SQUARES: (relative <= rtol**2)
            | (stagnant & (best_relative <= max(rtol, 10 * precision) ** 2)),
            Reason.CONDITION: stagnant,
        }
        reason = jnp.select(list(conditions.values()), list(conditions), _GO_ON)
        return state._replace(reason=reason.astype(jnp.int32), stagnant=stagnant)


_GO_ON = -1


def _is_idle(state: _State) -> Bool[Array, ""]:
    return state.since_best >= 20 + state.iteration // 4


class _Iterate(NamedTuple):
    x: Vector
    residual_squared: Scalar
    squared: Scalar


class _State(NamedTuple):
    iteration: Int[Array, ""]
    last: _Iterate
    best: _Iterate
    since_best: Int[Array, ""]
    residual: Vector
    direction: Vector
    operator_norm_squared: Scalar
    reason: Int[Array, ""]
    stagnant: Bool[Array, ""]
