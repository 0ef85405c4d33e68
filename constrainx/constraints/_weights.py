"""Constraints on the lengths and angles of weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from constrainx.constraints._constraint import Constraint
from constrainx.constraints._on_weights import Corrected
from constrainx.errors import ArgumentError

# In units of the rounding: a vector that should have length one and is shorter than this has no
# direction to be made longer in.
SHORTEST = 500


@dataclasses.dataclass(frozen=True)
class UnitNorm(Constraint):
    """Vectors of length one: ‖w‖² = 1 along an axis. Exact; a row for each vector.

    The rows are 2w, so the step is known, u' = u − w (2 w·u + γ c) / 2‖w‖², and needs no solver,
    unless another constraint moves the same weights.

    Attributes:
        of: model ↦ array.
        axis: the axis, or axes, along which the norm is taken; None for the whole array.
    """

    of: Callable[[Any], Array]
    axis: int | tuple[int, ...] | None = None

    def residual(self, model: Any, batch: Any, *, key: Array) -> Float[Array, ...]:  # noqa: ARG002
        """Returns ‖w‖² − 1."""
        return jnp.sum(jnp.square(self.of(model)), axis=self.axis) - 1

    def select(self, model: Any) -> Float[Array, ...]:
        """Returns w."""
        return self.of(model)

    def correct(
        self, weights: Float[Array, ...], change: Float[Array, ...], gamma: Float[Array, ""]
    ) -> Corrected:
        """Returns u' for u."""

        def total(array: Array) -> Array:
            return jnp.sum(array, axis=self.axis, keepdims=True)

        squares = total(jnp.square(weights))
        movable = squares > (SHORTEST * float(jnp.finfo(weights.dtype).eps)) ** 2
        asked = 2 * total(weights * change) + gamma * (squares - 1)
        scale = jnp.where(movable, asked / (2 * jnp.where(movable, squares, 1)), 0)
        return Corrected((change - weights * scale).astype(change.dtype), jnp.all(movable))


@dataclasses.dataclass(frozen=True)
class Orthogonality(Constraint):
    """A matrix with orthonormal columns, WᵀW = I, or rows if it is wide. Exact.

    k(k+1)/2 rows for k = min(W.shape): the upper triangle, since the residual is symmetric. Their
    gradients are W S for symmetric S, so the step is known, and needs no solver, unless another
    constraint moves the same weights:

        u' = u − W S,    WᵀW S + S WᵀW = Wᵀu + uᵀW + γ (WᵀW − I).

    Attributes:
        of: model ↦ matrix.
    """

    of: Callable[[Any], Float[Array, "n m"]]

    def residual(self, model: Any, batch: Any, *, key: Array) -> Float[Array, " entries"]:  # noqa: ARG002
        """Returns the upper triangle of WᵀW − I."""
        matrix = _stand_up(self.select(model))
        size = matrix.shape[1]
        gram = jnp.matmul(matrix.T, matrix, precision="highest")
        return (gram - jnp.eye(size, dtype=gram.dtype))[jnp.triu_indices(size)]

    def select(self, model: Any) -> Float[Array, "n m"]:
        """Returns W."""
        matrix = self.of(model)
        if matrix.ndim != 2:
            raise ArgumentError(
                f"`Orthogonality(of=...)` must select a matrix, got shape {matrix.shape}. Reshape "
                "a kernel with more axes, such as `lambda m: m.conv.kernel[...].reshape(-1, 16)`."
            )
        return matrix

    def correct(
        self, weights: Float[Array, "n m"], change: Float[Array, "n m"], gamma: Float[Array, ""]
    ) -> Corrected:
        """Returns u' for u."""
        matrix, update = _stand_up(weights), _stand_up(change)
        product = jnp.matmul(matrix.T, update, precision="highest")
        gram = jnp.matmul(matrix.T, matrix, precision="highest")
        excess = gram - jnp.eye(len(gram), dtype=gram.dtype)
        asked = product + product.T + gamma.astype(gram.dtype) * excess
        factor, exists = _solve_lyapunov(gram, asked)
        corrected = update - jnp.matmul(matrix, factor, precision="highest")
        return Corrected(corrected.T if weights.shape != corrected.shape else corrected, exists)


def _stand_up(matrix: Float[Array, "n m"]) -> Array:
    return matrix.T if matrix.shape[0] < matrix.shape[1] else matrix


def _solve_lyapunov(gram: Float[Array, "k k"], right: Float[Array, "k k"]) -> tuple[Array, Array]:
    """The symmetric S with G S + S G = T, and whether G is regular enough for any T.

    By eigenvalues; the derivative is that of the equation, because the derivatives of single
    eigenvectors are infinite where eigenvalues meet, as all of them do at WᵀW = I.
    """
    values, vectors = jax.lax.stop_gradient(jnp.linalg.eigh(gram))
    eps = float(jnp.finfo(gram.dtype).eps)
    smallest = jnp.maximum(10 * len(gram) * eps * values[-1], (SHORTEST * eps) ** 2)
    sums = values[:, None] + values
    # Each eigenvalue by itself: a sum of one that is rounding and one that is not says nothing
    # about the first, but can be divided by.
    solvable = sums > 2 * smallest

    def apply(s: Array) -> Array:
        product = jnp.matmul(gram, s, precision="highest")
        return product + jnp.matmul(s, gram, precision="highest")

    def turn(array: Array, basis: Array) -> Array:
        inner = jnp.matmul(basis.T, array, precision="highest")
        return jnp.matmul(inner, basis, precision="highest")

    def divide(_: object, t: Array) -> Array:
        parts = jnp.where(solvable, turn(t, vectors) / jnp.where(solvable, sums, 1), 0)
        return turn(parts, vectors.T)

    solution = jax.lax.custom_linear_solve(apply, right, divide, symmetric=True)
    return solution, values[0] > smallest
