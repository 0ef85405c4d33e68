"""Finds out by numbers whether a function is linear, where its operations do not tell."""

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
    """Whether matvec(0) = 0, and ⟨A w, A w⟩ = ⟨AᵀA w, w⟩ for a random w; takes two products more.

    The first finds a constant. The second finds whatever else has a derivative that is not it, such
    as a rounding, whose derivative is zero; it leaves room for operators in half precision.
    Raises a TypeError rather than to say no outside of `jax.jit`.
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


def reported(info: Info, linear: Bool[Array, ""]) -> Info:
    """The same report, or one that the operator was not linear."""
    return info._replace(
        converged=info.converged & linear,
        reason=jnp.where(linear, info.reason, Reason.NOT_LINEAR),
    )
