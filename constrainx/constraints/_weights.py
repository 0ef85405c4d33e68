"""Constraints on the weights themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from constrainx.constraints._constraint import Constraint
from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class UnitNorm(Constraint):
    """Vectors of length one: ‖w‖² = 1 along an axis. Exact; a row for each vector.

    Attributes:
        of: model ↦ array.
        axis: the axis, or axes, along which the norm is taken; None for the whole array.
    """

    of: Callable[[Any], Array]
    axis: int | tuple[int, ...] | None = None

    def residual(self, model: Any, batch: Any, *, key: Array) -> Float[Array, ...]:  # noqa: ARG002
        """Returns ‖w‖² − 1."""
        return jnp.sum(jnp.square(self.of(model)), axis=self.axis) - 1


@dataclasses.dataclass(frozen=True)
class Orthogonality(Constraint):
    """A matrix with orthonormal columns, WᵀW = I, or rows if it is wide. Exact.

    k(k+1)/2 rows for k = min(W.shape): the upper triangle, since the residual is symmetric.

    Attributes:
        of: model ↦ matrix.
    """

    of: Callable[[Any], Float[Array, "n m"]]

    def residual(self, model: Any, batch: Any, *, key: Array) -> Float[Array, " entries"]:  # noqa: ARG002
        """Returns the upper triangle of WᵀW − I."""
        matrix = self.of(model)
        if matrix.ndim != 2:
            raise ArgumentError(
                f"`Orthogonality(of=...)` must select a matrix, got shape {matrix.shape}. Reshape "
                "a kernel with more axes, such as `lambda m: m.conv.kernel[...].reshape(-1, 16)`."
            )
        matrix = matrix.T if matrix.shape[0] < matrix.shape[1] else matrix
        size = matrix.shape[1]
        gram = jnp.matmul(matrix.T, matrix, precision="highest")
        return (gram - jnp.eye(size, dtype=gram.dtype))[jnp.triu_indices(size)]
