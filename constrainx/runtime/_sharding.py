"""How arrays are split over devices: a mesh `data` × `fsdp`, and a rule for each kind of array."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from constrainx.data import check_integers
from constrainx.errors import ArgumentError

# Gathering smaller arrays costs more than it saves: every device has a copy of them.
SMALLEST_SPLIT = 2**14


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharding:
    """The devices of a run, and how arrays are split over them.

    A batch is split over both axes along its first dimension. A large parameter is split over
    `fsdp`, along its longest dimension that divides evenly. Everything else is copied to every
    device. Optimizer state, gradients and the vectors of a least-squares solve are split as their
    parameters are.

    >>> sharding = Sharding.over(devices=1)
    >>> dict(sharding.mesh.shape)
    {'data': 1, 'fsdp': 1}
    """

    mesh: Mesh

    @classmethod
    def over(cls, *, devices: int | None = None, fsdp: int = 1) -> Sharding:
        """A mesh over some of the devices.

        Args:
            devices: how many to use; all by default.
            fsdp: how many of them share each large parameter.
        """
        available = jax.devices()
        count = len(available) if devices is None else devices
        if not 1 <= count <= len(available):
            allowed = "1" if len(available) == 1 else f"between 1 and {len(available)}"
            raise ArgumentError(
                f"`devices={devices}` must be {allowed}, as many as JAX sees. `constrainx info` "
                "lists them."
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
        """The sharding of a batch: by its examples, over all devices."""
        return NamedSharding(self.mesh, PartitionSpec(("data", "fsdp")))

    @property
    def whole(self) -> NamedSharding:
        """The sharding of an array that every device has a copy of."""
        return NamedSharding(self.mesh, PartitionSpec())

    def of_parameter(self, array: Any) -> NamedSharding:
        """The sharding of an array of the training state, which depends on its shape alone."""
        parts = self.mesh.shape["fsdp"]
        divisible = [axis for axis, n in enumerate(array.shape) if n % parts == 0]
        if parts == 1 or math.prod(array.shape) < SMALLEST_SPLIT or not divisible:
            return self.whole
        longest = max(divisible, key=lambda axis: array.shape[axis])
        spec = ["fsdp" if axis == longest else None for axis in range(len(array.shape))]
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def of_state(self, state: PyTree) -> PyTree[NamedSharding]:
        """The shardings of a training state."""
        return jax.tree.map(self.of_parameter, state)

    def shapes(self, state: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
        """The shapes of a state, with their shardings, from which a step can be compiled."""
        return jax.tree.map(lambda leaf: _shape(leaf, self.of_parameter(leaf)), state)

    def shapes_of_batch(self, rows: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
        """The shapes of a batch, with their sharding."""
        return jax.tree.map(lambda leaf: _shape(leaf, self.batch), rows)

    def place(self, state: PyTree) -> PyTree:
        """Copies a state to its devices, and leaves the original as it is."""

        def put(array: Any, sharding: NamedSharding) -> jax.Array:
            # Through the host, where each process has the whole array and takes its part.
            host = np.asarray(array)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(put, state, self.of_state(state))

    def place_batch(self, rows: PyTree[np.ndarray]) -> PyTree[jax.Array | np.ndarray]:
        """Puts a batch on the devices; each process passes its own rows of it.

        On one device the rows are returned as they are, because `jax.jit` moves them faster.

        Raises:
            ArgumentError: an integer has more bits than JAX keeps.
        """
        check_integers(rows, of="the batches")
        if self.mesh.size == 1:
            return rows
        return jax.tree.map(
            lambda leaf: jax.make_array_from_process_local_data(self.batch, np.asarray(leaf)), rows
        )

    def check_batch(self, batch: int, *, owner: str = "batch") -> None:
        """Raises unless a batch of this size can be split over the devices."""
        count = self.mesh.size
        if batch % count:
            below, above = batch - batch % count, batch + count - batch % count
            near = [n for n in (below, above) if n]
            raise ArgumentError(
                f"`{owner}={batch}` must be a multiple of the {count} devices it is split over: "
                f"use {' or '.join(map(str, near))}, or fewer `devices`."
            )

    def describe(self, state: PyTree, batch: int) -> str:
        """One line on how batch and parameters are split, and on the memory per device."""
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
            f"{self.mesh.shape['fsdp']}: batch {batch}, {batch // self.mesh.size} per device; "
            f"{split} of {len(leaves)} arrays of the state split, {_bytes(held)} of "
            f"{_bytes(total)} per device"
        )


def _shape(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
