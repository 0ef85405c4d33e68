"""Affine equations between weights."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from constrainx.constraints._constraint import Constraint
from constrainx.constraints._on_weights import Corrected
from constrainx.errors import ArgumentError


class FixedArray:
    """An array that can be compared and has a hash, as a constant of a compiled function must."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array.copy()
        self.array.setflags(write=False)
        self._digest = (array.shape, hashlib.sha256(array.tobytes()).hexdigest())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedArray) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"FixedArray(shape={self.array.shape})"


@dataclasses.dataclass(frozen=True)
class Affine(Constraint):
    """A w = b for chosen weights, such as kernels whose columns sum to zero. Exact.

    A is factorised when the constraint is made, A = L Q with orthonormal rows of Q. A step then
    costs two products with Q and no solver, unless another constraint moves the same weights:

        u' = u − Qᵀ(Q u + γ (Q w − L⁺b)).

    >>> import jax.numpy as jnp, constrainx as cx
    >>> centred = cx.Affine(lambda m: m.kernel[...], jnp.ones((1, 8)), axis=0)
    >>> centred.label
    'affine'

    Attributes:
        of: model ↦ array.
        matrix: A, of shape (rows, n). Rows may depend on each other.
        offset: b, a number or one for each row.
        axis: the axis of the array on which A acts, for each slice along the others; None for all
            entries as one vector w, in the order of ``reshape(-1)``.
    """

    of: Callable[[Any], Float[Array, ...]]
    matrix: Any
    offset: Any = 0.0
    axis: int | None = None
    gamma: float | Callable[[Any], Any] = dataclasses.field(default=1.0, kw_only=True)
    _basis: FixedArray = dataclasses.field(init=False, repr=False, compare=False)
    _target: FixedArray = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        matrix = np.asarray(self.matrix, dtype=np.float64)
        if matrix.ndim != 2 or not matrix.size or not np.all(np.isfinite(matrix)):
            raise ArgumentError(
                "`Affine(matrix=...)` must be a finite matrix with a row for each equation, got "
                f"shape {matrix.shape}. Write a single equation as `matrix[None]`."
            )
        offset = np.asarray(self.offset, dtype=np.float64)
        if offset.shape not in ((), (1,), (len(matrix),)) or not np.all(np.isfinite(offset)):
            raise ArgumentError(
                "`Affine(offset=...)` must be a finite number, or one for each of the "
                f"{len(matrix)} rows of `matrix`, got shape {offset.shape}."
            )
        offset = np.broadcast_to(offset, (len(matrix),))
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        keep = values > max(matrix.shape) * np.finfo(np.float64).eps * values[0]
        if not np.any(keep):
            raise ArgumentError("`Affine(matrix=...)` must not be zero.")
        target = (left[:, keep].T @ offset) / values[keep]
        undone = np.linalg.norm(left[:, keep] @ (values[keep] * target) - offset)
        if undone > 1e-9 * np.linalg.norm(offset):
            raise ArgumentError(
                "`Affine(matrix=..., offset=...)` has no solution: rows of `matrix` depend on each "
                f"other and their offsets contradict, by {undone:.2g} in norm. Drop one of them."
            )
        fixed = {"matrix": matrix, "offset": offset, "_basis": right[keep], "_target": target}
        for name, array in fixed.items():
            object.__setattr__(self, name, FixedArray(array))

    def residual(self, model: Any, batch: Any, *, key: Array) -> Float[Array, ...]:  # noqa: ARG002
        """Returns A w − b."""
        return self._apply(self.matrix, self.offset, self.select(model))

    def select(self, model: Any) -> Float[Array, ...]:
        """Returns w."""
        weights = self.of(model)
        size = weights.size
        if self.axis is not None:
            if not -weights.ndim <= self.axis < weights.ndim:
                raise ArgumentError(
                    f"`Affine(axis={self.axis})` is not an axis of the array that `of` selects, "
                    f"of shape {weights.shape}."
                )
            size = weights.shape[self.axis]
        columns = self.matrix.array.shape[1]
        if size != columns:
            raise ArgumentError(
                f"`Affine(matrix=...)` has {columns} columns, but `of` selects an array of shape "
                f"{weights.shape}, with {size} entries "
                f"{'in all' if self.axis is None else f'along axis {self.axis}'}."
            )
        return weights

    def correct(
        self, weights: Float[Array, ...], change: Float[Array, ...], gamma: Float[Array, ""]
    ) -> Corrected:
        """Returns u' for u."""
        gamma = gamma.astype(change.dtype)
        asked = self._apply(self._basis, FixedArray(np.zeros(len(self._target.array))), change)
        asked += gamma * self._apply(self._basis, self._target, weights)
        basis = jnp.asarray(self._basis.array, change.dtype)
        pulled = jnp.tensordot(basis, asked, axes=(0, 0), precision="highest")
        if self.axis is None:
            return Corrected(change - pulled.reshape(change.shape))
        return Corrected(change - jnp.moveaxis(pulled, 0, self.axis))

    def _apply(
        self, matrix: FixedArray, offset: FixedArray, array: Float[Array, ...]
    ) -> Float[Array, ...]:
        """M w − b, with the rows on the first axis."""
        vectors = array.reshape(-1) if self.axis is None else jnp.moveaxis(array, self.axis, 0)
        rows = jnp.tensordot(
            jnp.asarray(matrix.array, array.dtype), vectors, axes=(1, 0), precision="highest"
        )
        shape = (-1,) + (1,) * (rows.ndim - 1)
        return rows - jnp.asarray(offset.array, array.dtype).reshape(shape)
