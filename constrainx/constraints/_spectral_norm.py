"""A bound on the spectral norm of kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from constrainx.constraints._constraint import Constraint
from constrainx.constraints._numbers import as_count, as_number
from constrainx.constraints._on_weights import Corrected
from constrainx.constraints._singular_values import (
    clip_singular_values,
    largest_singular_values,
    spectral_norm,
)
from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class SpectralNorm(Constraint):
    """No singular value of a kernel is above a bound: ‖W‖₂ ≤ at_most.

    By default for the kernels of all dense layers and convolutions of the module:

    - of a dense layer, the matrix from inputs to outputs, so that the layer has a Lipschitz
      constant of at most the bound;
    - of a convolution, the matrix (window · inputs, outputs) that maps one patch of the image to
      one pixel, for each group of channels. The layer's Lipschitz constant is then at most the
      bound times √p, where p is the number of patches that a pixel is part of: the size of the
      window at stride one;
    - layers that are stacked along first axes, by `jax.vmap` or for a scan, are bounded one by one.

    The step is exact: the nearest point within the bound is known, with its singular values clipped
    to it, U min(Σ, b) Vᵀ. An update u becomes the nearest u' that leaves θ + u' within the bound,
    or, from further out, within the bound and the fraction 1 − γ of what exceeded it. It costs an
    eigendecomposition of WᵀW, or of W Wᵀ if that is smaller. Where another constraint moves the
    same weights, or for `Penalty` and `Lagrangian`, the rows are the largest singular values of
    each kernel by the power method. Such rows hold to first order, and only that many directions at
    a time. The figures of a step's report come from them, too; `violation` is exact.

    >>> import constrainx as cx
    >>> cx.SpectralNorm(at_most=1.0).label
    'spectral-norm'

    Attributes:
        at_most: the bound, above 0.
        of: model ↦ a pytree of matrices; None for the kernels of all layers.
        values: how many singular values of each kernel are rows.
        iterations: of the power method, from the same start in each step.
    """

    kind: ClassVar[Literal["equality", "inequality"]] = "inequality"

    at_most: float
    of: Callable[[Any], PyTree[Float[Array, ...]]] | None = None
    values: int = 4
    iterations: int = 20
    gamma: float | Callable[[Any], Any] = dataclasses.field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        bound = as_number(self.at_most, argument="SpectralNorm(at_most=...)")
        if not bound > 0:
            raise ArgumentError(
                f"`SpectralNorm(at_most=...)` must be above 0, got {bound!r}. One makes layers "
                "that do not lengthen differences."
            )
        object.__setattr__(self, "at_most", bound)
        for name in ("values", "iterations"):
            count = as_count(getattr(self, name), argument=f"SpectralNorm({name}=...)")
            object.__setattr__(self, name, count)

    def residual(self, model: Any, batch: Any, *, key: Array) -> list[Float[Array, ...]]:  # noqa: ARG002
        """Returns the largest singular values of each kernel, minus the bound."""
        return [
            largest_singular_values(matrix, min(self.values, *matrix.shape[-2:]), self.iterations)
            - self.at_most
            for matrix in jax.tree.leaves(self.select(model))
        ]

    def select(self, model: Any) -> PyTree[Float[Array, ...]]:
        """Returns the matrices that are bounded, in stacks."""
        if self.of is None:
            return _find_kernels(model)
        matrices = self.of(model)
        shapes = [matrix.shape for matrix in jax.tree.leaves(matrices)]
        if not shapes or any(len(shape) != 2 for shape in shapes):
            raise ArgumentError(
                f"`SpectralNorm(of=...)` must select matrices, got shapes {shapes}. Reshape a "
                "kernel with more axes, such as `lambda m: m.conv.kernel[...].reshape(-1, 16)`."
            )
        return matrices

    def correct(
        self, weights: PyTree[Array], change: PyTree[Array], gamma: Float[Array, ""]
    ) -> Corrected:
        """Returns the nearest change to one that stays within the bound."""

        def bind(matrix: Array, update: Array) -> Array:
            pull = gamma.astype(matrix.dtype)
            # Far from the bound, what is left of the excess is as good as within it.
            excess = jnp.maximum(spectral_norm(matrix) - self.at_most, 0)
            bound = self.at_most + jnp.maximum(1 - pull, 0) * excess
            clipped = clip_singular_values(matrix + update, bound)
            # A γ that is not allowed must not go unnoticed.
            return clipped - matrix + 0 * pull

        return Corrected(jax.tree.map(bind, weights, change))

    def violation(self, model: Any, batch: Any, key: Array) -> Float[Array, ""]:  # noqa: ARG002
        """Returns by how much the largest singular value of all kernels exceeds the bound."""
        matrices = jax.tree.leaves(self.select(model))
        norms = [jnp.max(jnp.linalg.norm(m, ord=2, axis=(-2, -1))) for m in matrices]
        return jnp.maximum(jnp.max(jnp.stack(norms)) - self.at_most, 0)


def _find_kernels(model: Any) -> list[Float[Array, ...]]:
    """The kernels of dense layers and convolutions as matrices, each once."""
    found: dict[int, Array] = {}
    for _, module in nnx.iter_modules(model):
        kernel = getattr(module, "kernel", None)
        if isinstance(kernel, nnx.Param):
            matrix = _as_matrices(module, kernel[...])
            if matrix is not None:
                found.setdefault(id(kernel), matrix)
    if not found:
        raise ArgumentError(
            f"`SpectralNorm` finds no kernel of a dense layer or convolution in this "
            f"{type(model).__name__}: say which matrices it is about with `of=`."
        )
    return list(found.values())


def _as_matrices(module: Any, kernel: Array) -> Float[Array, "*stack n m"] | None:
    if isinstance(module, nnx.Linear):
        return kernel
    if isinstance(module, nnx.LinearGeneral):
        inputs, outputs = len(module.in_features), len(module.out_features)
        stack = kernel.shape[: kernel.ndim - inputs - outputs]
        return kernel.reshape(*stack, math.prod(module.in_features), -1)
    if isinstance(module, nnx.Conv | nnx.ConvTranspose):
        window = len(module.kernel_size)
        stack, outputs = kernel.shape[: kernel.ndim - window - 2], kernel.shape[-1]
        groups = getattr(module, "feature_group_count", 1)
        matrix = kernel.reshape(*stack, -1, groups, outputs // groups)
        return jnp.swapaxes(matrix, -2, -3) if groups > 1 else matrix.reshape(*stack, -1, outputs)
    return None
