"""LSMR: least squares by Golub-Kahan bidiagonalisation, one A and one Aᵀ an iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from constrainx.linalg import _vector
from constrainx.linalg._info import Info, Reason
from constrainx.linalg._line import solve_on_a_line
from constrainx.linalg._operator import LinearOperator
from constrainx.linalg._problem import LeastSquares
from constrainx.linalg._validate import check_at_least, check_iterations
from constrainx.linalg._vector import Scalar, Vector


@dataclasses.dataclass(frozen=True)
class LSMR:
    """The method of Fong and Saunders (2011), the default of `lstsq`.

    In exact arithmetic this is MINRES on AᵀA x = Aᵀb, without ever squaring the condition number.
    The stopping rules are those of the paper and of SciPy: ‖r‖ ≤ rtol (‖A‖‖x‖ + ‖b‖),
    ‖Aᵀr‖ ≤ rtol ‖A‖‖r‖, or cond(A) ≥ condition_limit.

    Attributes:
        rtol: serves as both of Fong and Saunders' tolerances, atol and btol.
        condition_limit: stop once the estimate of cond(A) passes this; `float("inf")` never does.
        max_iterations: defaults to ten times the smaller side of A.
    """

    rtol: float = 1e-6
    condition_limit: float = 1e8
    max_iterations: int | None = None

    def __post_init__(self) -> None:
        check_at_least("LSMR", "rtol", self.rtol, 0.0)
        check_at_least("LSMR", "condition_limit", self.condition_limit, 1.0)
        check_iterations("LSMR", self.max_iterations)

    def solve(self, problem: LeastSquares) -> tuple[Vector, Info]:
        """Solves the problem, see `lstsq`."""
        if min(problem.operator.shape) == 1:
            return solve_on_a_line(problem)
        scaled, first, unscale = _start(problem)
        limit = self.max_iterations
        if limit is None:
            limit = 10 * min(problem.operator.shape)

        def go_on(state: _State) -> Bool[Array, ""]:
            return (state.reason == _GO_ON) & (state.iteration < limit)

        return unscale(jax.lax.while_loop(go_on, lambda s: self._iterate(scaled, s), first))

    def _iterate(self, problem: LeastSquares, state: _State) -> _State:
        # The names are those of Fong and Saunders, bars and tildes included.
        s = state
        u = _vector.axpy(-s.alpha, s.u, problem.operator.matvec(s.v))
        beta = _vector.norm(u)
        u = _vector.scale(_vector.reciprocal(beta), u)
        v = _vector.axpy(-beta, s.v, problem.operator.rmatvec(u))
        alpha = _vector.norm(v)
        v = _vector.scale(_vector.reciprocal(alpha), v)

        c_hat, s_hat, alpha_hat = _rotation(s.alpha_bar, problem.damp)
        c, sn, rho = _rotation(alpha_hat, beta)
        theta_new = sn * alpha
        alpha_bar = c * alpha
        theta_bar = s.s_bar * rho
        rho_temp = s.c_bar * rho
        c_bar, s_bar, rho_bar = _rotation(rho_temp, theta_new)
        zeta = c_bar * s.zeta_bar
        zeta_bar = -s_bar * s.zeta_bar

        # A norm is finite only if all entries are; if one is not, x stays what it was.
        step = _divide(zeta, rho * rho_bar)
        finite = jnp.isfinite(alpha) & jnp.isfinite(beta) & jnp.isfinite(step)
        h_bar = _vector.axpy(-_divide(theta_bar * rho, s.rho * s.rho_bar), s.h_bar, s.h)
        x = _vector.axpy(jnp.where(finite, step, 0), h_bar, s.x)
        h = _vector.axpy(-_divide(theta_new, rho), s.h, v)

        beta_acute = c_hat * s.beta_dd
        beta_check = -s_hat * s.beta_dd
        beta_hat = c * beta_acute
        beta_dd = -sn * beta_acute
        c_tilde, s_tilde, rho_tilde = _rotation(s.rho_d, theta_bar)
        theta_tilde = s_tilde * rho_bar
        rho_d = c_tilde * rho_bar
        beta_d = -s_tilde * s.beta_d + c_tilde * beta_hat
        tau_tilde = _divide(s.zeta - s.theta_tilde * s.tau_tilde, rho_tilde)
        tau_d = _divide(zeta - theta_tilde * tau_tilde, rho_d)
        d = s.d + beta_check**2
        residual_norm = jnp.sqrt(d + (beta_d - tau_d) ** 2 + beta_dd**2)

        operator_norm_squared = s.operator_norm_squared + beta**2
        operator_norm = jnp.sqrt(operator_norm_squared)
        # The first rho_bar is a convention, not a property of A.
        largest = jnp.where(s.iteration > 0, jnp.maximum(s.largest, s.rho_bar), s.largest)
        smallest = jnp.where(s.iteration > 0, jnp.minimum(s.smallest, s.rho_bar), s.smallest)
        condition = _divide(jnp.maximum(largest, rho_temp), jnp.minimum(smallest, rho_temp))

        new = _State(
            iteration=s.iteration + 1, u=u, v=v, h=h, h_bar=h_bar, x=x,
            alpha=alpha, alpha_bar=alpha_bar, rho=rho, rho_bar=rho_bar, c_bar=c_bar, s_bar=s_bar,
            zeta=zeta, zeta_bar=zeta_bar, beta_d=beta_d, beta_dd=beta_dd, rho_d=rho_d,
            tau_tilde=tau_tilde, theta_tilde=theta_tilde, d=d,
            operator_norm_squared=operator_norm_squared + alpha**2,
            largest=largest, smallest=smallest, condition=condition,
            residual_norm=residual_norm, normal_residual_norm=jnp.abs(zeta_bar), reason=s.reason,
        )  # fmt: skip
        return new._replace(reason=self._why_stop(problem, new, operator_norm, finite))

    def _why_stop(
        self, problem: LeastSquares, state: _State, operator_norm: Scalar, finite: Bool[Array, ""]
    ) -> Int[Array, ""]:
        growth = operator_norm * _vector.norm(state.x) / problem.b_norm
        relative = state.residual_norm / problem.b_norm
        optimality = _divide(
            state.normal_residual_norm, operator_norm * state.residual_norm, otherwise=jnp.inf
        )
        inverse_condition = 1 / state.condition
        # The tests against 1 stop at the precision of the arithmetic, however small `rtol` is.
        conditions = {
            Reason.NOT_FINITE: ~(finite & jnp.isfinite(growth)),
            Reason.RESIDUAL: (relative <= self.rtol * (1 + growth))
            | (1 + relative / (1 + growth) <= 1),
            Reason.LEAST_SQUARES: (optimality <= self.rtol) | (1 + optimality <= 1),
            Reason.CONDITION: (inverse_condition <= 1 / self.condition_limit)
            | (1 + inverse_condition <= 1),
        }
        return jnp.select(list(conditions.values()), list(conditions), _GO_ON).astype(jnp.int32)


_GO_ON = -1


class _State(NamedTuple):
    """One iteration of Fong and Saunders' Algorithm LSMR, with the norm estimates of section 5."""

    iteration: Int[Array, ""]
    u: Vector
    v: Vector
    h: Vector
    h_bar: Vector
    x: Vector
    alpha: Scalar
    alpha_bar: Scalar
    rho: Scalar
    rho_bar: Scalar
    c_bar: Scalar
    s_bar: Scalar
    zeta: Scalar
    zeta_bar: Scalar
    beta_d: Scalar
    beta_dd: Scalar
    rho_d: Scalar
    tau_tilde: Scalar
    theta_tilde: Scalar
    d: Scalar
    operator_norm_squared: Scalar
    largest: Scalar
    smallest: Scalar
    condition: Scalar
    residual_norm: Scalar
    normal_residual_norm: Scalar
    reason: Int[Array, ""]


def _start(
    problem: LeastSquares,
) -> tuple[LeastSquares, _State, Callable[[_State], tuple[Vector, Info]]]:
    """Scales the problem to norms around one, and takes the first half step.

    The scales are powers of two: they change no digit of the iterates, and keep squares from
    overflowing or vanishing, which in float32 they do beyond 1e±19.
    """
    operator = problem.operator
    dtype = _vector.scalar_dtype(operator.rows, operator.columns)
    damp = jnp.abs(problem.damp.astype(dtype))

    b_scale = _vector.power_of_two(_vector.largest(problem.b))
    b = _vector.scale(b_scale, problem.b)
    beta = _vector.norm(b)
    u = _vector.scale(_vector.reciprocal(beta), b)

    v = operator.rmatvec(u)
    scale = _vector.power_of_two(jnp.maximum(_vector.largest(v), damp))
    v = _vector.scale(scale, v)
    alpha = _vector.norm(v)
    v = _vector.scale(_vector.reciprocal(alpha), v)

    scaled = LeastSquares(
        operator=LinearOperator(
            lambda v: _vector.scale(scale, operator.matvec(v)),
            lambda u: _vector.scale(scale, operator.rmatvec(u)),
            operator.columns,
            operator.rows,
        ),
        b=b,
        damp=damp * scale,
        b_norm=jnp.maximum(problem.b_norm.astype(dtype) * b_scale, beta),
    )
    finite = jnp.isfinite(alpha) & jnp.isfinite(beta) & jnp.isfinite(damp)
    zero, one = jnp.zeros((), dtype), jnp.ones((), dtype)
    state = _State(
        iteration=jnp.zeros((), jnp.int32),
        u=u, v=v, h=v, h_bar=_vector.zeros_like(v), x=_vector.zeros_like(v),
        alpha=alpha, alpha_bar=alpha, rho=one, rho_bar=one, c_bar=one, s_bar=zero,
        zeta=zero, zeta_bar=alpha * beta, beta_d=zero, beta_dd=beta, rho_d=one,
        tau_tilde=zero, theta_tilde=zero, d=zero, operator_norm_squared=alpha**2,
        largest=zero, smallest=jnp.full((), jnp.finfo(dtype).max, dtype), condition=one,
        residual_norm=beta, normal_residual_norm=alpha * beta,
        reason=jnp.where(
            finite, jnp.where(alpha * beta > 0, _GO_ON, Reason.TRIVIAL), Reason.NOT_FINITE
        ).astype(jnp.int32),
    )  # fmt: skip

    def unscale(state: _State) -> tuple[Vector, Info]:
        reason = jnp.where(state.reason == _GO_ON, Reason.MAX_ITERATIONS, state.reason)
        info = Info(
            converged=reason <= Reason.LEAST_SQUARES,
            reason=reason.astype(jnp.int32),
            iterations=state.iteration,
            residual_norm=state.residual_norm / b_scale,
            normal_residual_norm=state.normal_residual_norm / b_scale / scale,
            condition=state.condition,
        )
        return _vector.scale(scale / b_scale, state.x), info

    return scaled, state, unscale


def _rotation(a: Scalar, b: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """The plane rotation (c, s) that turns (a, b) into (r, 0)."""
    r = jnp.hypot(a, b)
    return _divide(a, r), _divide(b, r), r


def _divide(a: Scalar, b: Scalar, otherwise: float = 0.0) -> Scalar:
    return jnp.where(b == 0, otherwise, a / jnp.where(b == 0, 1, b))
