"""How parameters and activations can be split over devices."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float


def name_axes(*axes: str | None) -> dict[str, Any]:
    """Metadata of a parameter: a logical name for each of its axes, or None.

    They do nothing by themselves. `nnx.get_partition_spec` reads them, and
    ``nnx.logical_axis_rules([("out", "fsdp")])`` says which axis of a mesh each stands for.

    >>> from flax import nnx
    >>> layer = nnx.Linear(4, 8, kernel_metadata=name_axes("in", "out"), rngs=nnx.Rngs(0))
    >>> with nnx.logical_axis_rules([("in", None), ("out", "fsdp")]):
    ...     print(nnx.get_partition_spec(nnx.state(layer))["kernel"].get_value())
    P(None, 'fsdp')
    """
    # NNX would otherwise split the parameter as it is created, and fail where there is no mesh.
    return {"out_sharding": axes, "eager_sharding": False}


def split_examples(x: Float[Array, "batch ..."]) -> Float[Array, "batch ..."]:
    """Keeps activations split by examples where parameters are split over `fsdp`.

    In a loop XLA may otherwise split activations by channels, as the parameters are, and move
    them between devices in place of parameters. On other meshes nothing happens, nor where the
    devices do not divide the batch, as for single examples under `jax.vmap`. JAX refuses it under
    a `jax.vmap` whose `spmd_axis_name` is one of the same two axes.

    >>> import jax.numpy as jnp
    >>> split_examples(jnp.ones((2, 3))).shape
    (2, 3)
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.axis_names != ("data", "fsdp") or {*mesh.axis_types} != {AxisType.Auto}:
        return x
    if mesh.shape["fsdp"] == 1 or x.shape[0] % mesh.size:
        return x
    spec = PartitionSpec(("data", "fsdp"))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
