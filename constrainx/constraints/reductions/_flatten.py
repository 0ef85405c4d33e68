"""All entries of a residual in one vector."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from constrainx.constraints.reductions._reduction import Rows
from constrainx.errors import ArgumentError


def flatten(residual: PyTree) -> Rows:
    """Returns all entries of the residual in one vector of at least float32."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(residual)]
    if not leaves:
        raise ArgumentError("`residual` returned no arrays. It must return at least one.")
    dtype = jnp.result_type(jnp.float32, *leaves)
    return jnp.concatenate([leaf.reshape(-1).astype(dtype) for leaf in leaves])
