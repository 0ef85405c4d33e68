"""How arrays are split over devices: a mesh `data` × `fsdp`, and a rule for each kind of array."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from constrainx.errors import ArgumentError

# Smaller arrays are not worth a gather: they stay whole on each device.
SMALLEST_SPLIT = 2**14


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharding:
    """Which devices there are, and what lies where.

    The batch is split over both axes by its first dimension; a large parameter over `fsdp` by its
    longest dimension that divides; everything else is on each device. Optimizer state, gradients
    and the vectors of a least-squares solve lie as their parameters do.

    >>> sharding = Sharding.over(devices=1)
    >>> dict(sharding.mesh.shape)
    {'data': 1, 'fsdp': 1}
    """

    mesh: Mesh

    @classmethod
    def over(cls, *, devices: int | None = None, fsdp: int = 1) -> Sharding:
        """A mesh over so many devices, all by default, of which `fsdp` share each parameter."""
        available = jax.devices()
        count = len(available) if devices is None else devices
        if not 1 <= count <= len(available):
            raise ArgumentError(
                f"`devices={devices}` must be between 1 and {len(available)}, which is what JAX "
                "sees. `constrainx info` lists them."
            )
        used = {device.process_index for device in available[:count]}
        idle = sorted({*range(jax.process_count())} - used)
        if idle:
            raise ArgumentError(
                f"`devices={devices}` leaves none to process {', '.join(map(str, idle))}, which "
                "would have nothing to do: start fewer processes, or use all devices."
            )
        if fsdp < 1 or count % fsdp:
            choices = [n for n in range(1, count + 1) if count % n == 0]
            raise ArgumentError(
                f"`fsdp={fsdp}` must divide the {count} devices: use one of {choices}."
            )
        mesh = jax.make_mesh(
            (count // fsdp, fsdp),
            ("data", "fsdp"),
            axis_types=(AxisType.Auto, AxisType.Auto),
            devices=available[:count],
        )
        return cls(mesh=mesh)

    @property
    def batch(self) -> NamedSharding:
        """Of the examples, over all devices."""
        return NamedSharding(self.mesh, PartitionSpec(("data", "fsdp")))

    @property
    def whole(self) -> NamedSharding:
        """Of what each device has a copy of."""
        return NamedSharding(self.mesh, PartitionSpec())

    def of_parameter(self, array: Any) -> NamedSharding:
        """Of an array of the training state, by its shape alone."""
        parts = self.mesh.shape["fsdp"]
        divisible = [axis for axis, n in enumerate(array.shape) if n % parts == 0]
        if parts == 1 or math.prod(array.shape) < SMALLEST_SPLIT or not divisible:
            return self.whole
        longest = max(divisible, key=lambda axis: array.shape[axis])
        spec = ["fsdp" if axis == longest else None for axis in range(len(array.shape))]
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def of_state(self, state: PyTree) -> PyTree[NamedSharding]:
        """Of a whole training state."""
        return jax.tree.map(self.of_parameter, state)

    def place(self, state: PyTree) -> PyTree:
        """Copies the state to where it belongs; the originals are left alone."""

        def put(array: Any, sharding: NamedSharding) -> jax.Array:
            # By way of the host: each process has the whole array, and hands over its part.
            host = np.asarray(array)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(put, state, self.of_state(state))

    def place_batch(self, rows: PyTree[np.ndarray]) -> PyTree[jax.Array | np.ndarray]:
        """The global batch, of which each process gives its rows.

        On one device the rows are returned as they are: `jax.jit` moves them faster than we could.
        """
        if self.mesh.size == 1:
            return rows
        return jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(self.batch, np.asarray(leaf)), rows
        )

    def check_batch(self, batch: int, *, owner: str = "batch") -> None:
        """An error unless the batch can be split."""
        count = self.mesh.size
        if batch % count:
            below, above = batch - batch % count, batch + count - batch % count
            near = [n for n in (below, above) if n]
            raise ArgumentError(
                f"`{owner}={batch}` must be a multiple of the {count} devices it is split over: "
                f"use {' or '.join(map(str, near))}, or fewer `devices`."
            )

    def describe(self, state: PyTree, batch: int) -> str:
        """How batch and parameters are split, and the bytes a device, in one line."""
        leaves = jax.tree.leaves(state)
        split = sum(not self.of_parameter(leaf).is_fully_replicated for leaf in leaves)
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        held = sum(
            math.prod(self.of_parameter(leaf).shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in leaves
        )
        kind = self.mesh.devices.flat[0].device_kind
        processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        return (
            f"{self.mesh.size} × {kind}{processes}, data {self.mesh.shape['data']} × fsdp "
            f"{self.mesh.shape['fsdp']}: batch {batch}, {batch // self.mesh.size} a device; "
            f"{split} of {len(leaves)} arrays of the state split, {_bytes(held)} a device of "
            f"{_bytes(total)}"
        )


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
