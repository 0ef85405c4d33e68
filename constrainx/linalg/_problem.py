"""The problem that a solver is given, and the protocol of a solver."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from constrainx.linalg._info import Info
from constrainx.linalg._operator import LinearOperator
from constrainx.linalg._vector import Scalar, Vector


class LeastSquares(NamedTuple):
    """Minimise ‖A x − b‖² + damp²‖x‖²; of several minimisers, find the one of minimum norm.

    Attributes:
        operator: A, which multiplies vectors.
        b: the right-hand side, in at least float32, shaped like ``operator.rows``.
        damp: a scalar array, possibly traced, possibly zero. Only its square matters.
        b_norm: what to compare the norm of a residual with: ‖b‖, or, if the solve starts from an
            ``x0``, the norm of the right-hand side as the user gave it.
    """

    operator: LinearOperator
    b: Vector
    damp: Scalar
    b_norm: Scalar


@runtime_checkable
class Solver(Protocol):
    """Any hashable object with this one method, such as a frozen dataclass.

    `lstsq` differentiates through it by solving further problems with it, so `solve` itself need
    not be differentiable, but it must be traceable by JAX, also under `jax.vmap`.
    """

    def solve(self, problem: LeastSquares) -> tuple[Vector, Info]:
        """Returns the solution, shaped like ``problem.operator.columns``, and how it was found."""
        ...
