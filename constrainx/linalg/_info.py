"""What a solver reports besides the solution."""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from constrainx.errors import ArgumentError


class Reason(enum.IntEnum):
    """Why a solver stopped. The values up to `LEAST_SQUARES` mean that it converged."""

    TRIVIAL = 0
    RESIDUAL = 1
    LEAST_SQUARES = 2
    CONDITION = 3
    MAX_ITERATIONS = 4
    NOT_FINITE = 5
    RANK = 6
    NOT_LINEAR = 7

    @property
    def sentence(self) -> str:
        """The reason in words, and what to do about it."""
        return _SENTENCES[self]


_SENTENCES = {
    Reason.TRIVIAL: "the start is a solution: `b` is zero, or orthogonal to the range of A",
    Reason.RESIDUAL: "A x = b holds to the tolerance",
    Reason.LEAST_SQUARES: "x is a least-squares solution to the tolerance",
    Reason.CONDITION: (
        "A is too ill-conditioned for this solver and dtype: raise the solver's "
        "`condition_limit` if it has one, pass a `damp`, or compute in float64"
    ),
    Reason.MAX_ITERATIONS: (
        "the iterations ran out: raise `max_iterations` or loosen `rtol`, or pass a `damp`"
    ),
    Reason.NOT_FINITE: (
        "a NaN or an infinity: `b`, `damp` or an argument of `matvec` is not finite, "
        "or `matvec` overflows"
    ),
    Reason.RANK: (
        "A does not have full rank, which this solver needs: use `LSMR`, or pass a `damp`"
    ),
    Reason.NOT_LINEAR: (
        "`matvec` is not linear in its first argument, or has a `jax.custom_vjp` that is wrong: "
        "matvec(0) is not 0, or ⟨A w, A w⟩ is not ⟨AᵀA w, w⟩ for a random w"
    ),
}


class Info(NamedTuple):
    """How a solve went. A tuple of scalars, or of arrays of them under `jax.vmap`.

    Attributes:
        converged: whether x solves the problem to the solver's tolerance.
        reason: why the solver stopped, a `Reason` as an integer.
        iterations: how many iterations it took; one for a direct solver.
        residual_norm: ‖b − A x‖, or √(‖b − A x‖² + λ²‖x‖²) with damping.
        normal_residual_norm: ‖Aᵀ(b − A x) − λ² x‖, zero at a minimiser.
        condition: an estimate of the condition number of A, or of [A; λI] with damping.
    """

    converged: Bool[Array, ""]
    reason: Int[Array, ""]
    iterations: Int[Array, ""]
    residual_norm: Float[Array, ""]
    normal_residual_norm: Float[Array, ""]
    condition: Float[Array, ""]

    def explain(self) -> str:
        """One sentence for people, outside of `jax.jit` and `jax.vmap`.

        >>> import jax.numpy as jnp, constrainx as cx
        >>> x, info = cx.lstsq(lambda v: 2 * v, jnp.zeros(3), like=jnp.zeros(3))
        >>> info.explain()
        'converged after 0 iterations: the start is a solution: ...'
        """
        if isinstance(self.reason, jax.core.Tracer) or np.ndim(self.reason) > 0:
            raise ArgumentError(
                "`Info.explain` needs the figures of one finished solve: call it outside of "
                "`jax.jit`, and under `jax.vmap` pick a lane with `jax.tree.map`."
            )
        verdict = "converged" if bool(self.converged) else "did not converge"
        count = int(self.iterations)
        steps = "1 iteration" if count == 1 else f"{count} iterations"
        return f"{verdict} after {steps}: {Reason(int(self.reason)).sentence}"
