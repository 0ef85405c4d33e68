"""Arrays whose sharding is part of their type, on a mesh with explicit axes.

There JAX refuses to flatten a sharded array or to combine arrays of different shardings, since the
sharding of the result would be a guess. On other meshes XLA decides, and nothing is done here.
"""

from __future__ import annotations

import jax
from jaxtyping import Array


def replicate(array: Array) -> Array:
    """Returns an array that can be flattened: on explicit axes, a copy on each device."""
    sharding = _explicit_sharding(array)
    if sharding is None:
        return array
    return jax.sharding.reshard(array, jax.sharding.NamedSharding(sharding.mesh, jax.P()))


def shard_like(array: Array, like: Array) -> Array:
    """Returns the array in the explicit sharding of another, if that has one."""
    sharding = _explicit_sharding(like)
    return array if sharding is None else jax.sharding.reshard(array, sharding)


def _explicit_sharding(array: Array) -> jax.sharding.NamedSharding | None:
    sharding = jax.typeof(array).sharding
    return sharding if sharding.mesh.explicit_axes else None
