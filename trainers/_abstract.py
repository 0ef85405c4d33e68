"""Models of shapes alone, of which a trainer can be built that holds no arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree


def is_abstract(tree: PyTree) -> bool:
    """Whether some leaf has no values, only a shape and a dtype."""
    kinds = (jax.ShapeDtypeStruct, jax.core.Tracer)
    return any(isinstance(leaf, kinds) for leaf in jax.tree.leaves(tree))


def as_shapes(tree: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a tree."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype)),
        tree,
    )


def forget_values(model: Any) -> Any:
    """A copy of a model with shapes for parameters, whose random streams start from zero.

    Streams keep values because a step seeds them anew, and would fail on shapes.
    """
    parts: Any = nnx.split(model, nnx.RngState, ...)
    graph, rngs, rest = parts
    return nnx.merge(graph, jax.tree.map(_start_stream, rngs), as_shapes(rest))


def _start_stream(leaf: Any) -> jax.Array:
    # Inside of `jax.eval_shape` even a constant would be traced.
    with jax.ensure_compile_time_eval():
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros(leaf.shape, leaf.dtype)
        keys = (jax.random.key(0, impl=name) for name in ("threefry2x32", "rbg", "unsafe_rbg"))
        key = next(key for key in keys if key.dtype == leaf.dtype)
        return jnp.broadcast_to(key, leaf.shape)
