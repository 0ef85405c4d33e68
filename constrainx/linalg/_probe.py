"""Tests numerically whether a function is linear, where tracing it does not tell."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from constrainx.errors import ArgumentTypeError
from constrainx.linalg import _vector
from constrainx.linalg._info import Info, Reason
from constrainx.linalg._linearity import ADVICE, NOT_LINEAR
from constrainx.linalg._vector import Vector


def looks_linear(
    matvec: Callable[[Vector], Vector], rmatvec: Callable[[Vector], Vector], columns: PyTree
) -> Bool[Array, ""]:
    """Whether matvec(0) = 0 and ⟨A w, A w⟩ = ⟨AᵀA w, w⟩ for a random w, for two further products.

    The first finds an added constant. The second finds functions that differ from their derivative,
    such as a rounding, whose derivative is zero; it leaves room for operators in half precision.
    Outside of `jax.jit`, raises a TypeError instead of returning False.
    """
    leaves, tree = jax.tree.flatten(columns)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    w = jax.tree.unflatten(
        tree,
        [
            jax.random.normal(key, leaf.shape).astype(leaf.dtype)
            for key, leaf in zip(keys, leaves, strict=True)
        ],
    )
    image, at_zero = matvec(w), matvec(_vector.zeros_like(columns))
    squared = _vector.dot(image, image)
    tiny = jnp.finfo(squared.dtype).eps * squared
    close = jnp.abs(squared - _vector.dot(rmatvec(image), w)) <= 0.05 * squared
    # What is not finite is for the solver to report.
    linear = ~jnp.isfinite(squared) | (close & (_vector.dot(at_zero, at_zero) <= tiny))
    linear = jax.lax.stop_gradient(linear)
    if not isinstance(linear, jax.core.Tracer) and not linear:
        raise ArgumentTypeError(f"{NOT_LINEAR}. {ADVICE}")
    return linear


def report_linearity(info: Info, linear: Bool[Array, ""]) -> Info:
    """The same report, unless the operator was not linear: then one that says so."""
    return info._replace(
        converged=info.converged & linear,
        reason=jnp.where(linear, info.reason, Reason.NOT_LINEAR),
    )
