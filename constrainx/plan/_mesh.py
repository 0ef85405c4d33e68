"""The devices to plan for: simulated ones, or those of a GPU topology that is not there."""

from __future__ import annotations

import importlib.util
import os
import re

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from constrainx.errors import ArgumentError, MissingPackageError, did_you_mean
from constrainx.plan._targets import Target

COUNT = "--xla_force_host_platform_device_count"
# What brings XLA's compiler for GPUs, from new to old.
COMPILERS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def parse_mesh(text: str | None, *, devices: int) -> dict[str, int]:
    """The sizes of the mesh that a user asks for.

    >>> parse_mesh("fsdp=2", devices=8)
    {'data': 4, 'fsdp': 2}

    Args:
        text: such as "data=4,fsdp=2"; an axis that is left out gets the devices that remain.
        devices: how many there are.
    """
    sizes: dict[str, int] = {}
    for part in (text or "").split(",") if text else ():
        name, _, size = part.partition("=")
        if name not in ("data", "fsdp"):
            raise ArgumentError(
                f"`--mesh {text}` must name the axes data and fsdp, as in data=4,fsdp=2, got "
                f"{name!r}.{did_you_mean(name, ('data', 'fsdp'))}"
            )
        if not size.isdigit() or int(size) < 1:
            raise ArgumentError(f"`--mesh {text}` must give {name} a size, as in {name}=4.")
        sizes[name] = int(size)
    data, fsdp = sizes.get("data"), sizes.get("fsdp")
    if fsdp is None:
        fsdp = 1 if data is None or devices % data else devices // data
    if data is None:
        data = devices // fsdp
    if data * fsdp != devices:
        raise ArgumentError(f"`--mesh {text}` must have {devices} devices, got {data} × {fsdp}.")
    return {"data": data, "fsdp": fsdp}


def make_mesh(target: Target, sizes: dict[str, int]) -> Mesh:
    """A mesh of a target's devices, which need not exist.

    Nothing is put on a GPU of this machine, so a plan can be made while it trains.

    Args:
        target: the kind of device.
        sizes: of the axes "data" and "fsdp".

    Raises:
        MissingPackageError: XLA's compiler for GPUs is not installed.
        ArgumentError: JAX has started already, with fewer devices than are to be simulated.
    """
    shape = (sizes["data"], sizes["fsdp"])
    count = shape[0] * shape[1]
    if target.description is None:
        devices = _simulate(count)
    else:
        devices = _find_topology(target, count)
    return Mesh(np.array(devices).reshape(shape), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def _simulate(count: int) -> list[jax.Device]:
    flags = os.environ.get("XLA_FLAGS", "")
    asked = re.findall(rf"{COUNT}=(\d+)", flags)
    if count > (int(asked[-1]) if asked else 1):
        # Has an effect only before JAX looks for devices.
        os.environ["XLA_FLAGS"] = f"{flags} {COUNT}={count}".strip()
    jax.config.update("jax_platforms", "cpu")
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ArgumentError(
            f"JAX has started with {len(devices)} devices, and {count} are to be simulated: set "
            f"XLA_FLAGS={COUNT}={count} before."
        )
    return devices[:count]


def _find_topology(target: Target, count: int) -> list[jax.Device]:
    if not any(map(importlib.util.find_spec, COMPILERS)):
        raise MissingPackageError(
            f"`--target {target.name}` needs XLA's compiler for GPUs, but no GPU: pip install "
            "'constrainx[plan]'. `--target cpu` needs nothing."
        )
    if count > target.per_host and count % target.per_host:
        raise ArgumentError(
            f"`--devices {count}` must be a multiple of the {target.per_host} that a host has."
        )
    hosts = max(count // target.per_host, 1)
    # A GPU of this machine is left alone.
    jax.config.update("jax_platforms", "cpu")
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=target.description,
        topology=f"{hosts}x{count // hosts}x1",
    )
    return list(topology.devices)
