"""The devices that a step can be planned for, with the figures of their data sheets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from constrainx.plan._flops import Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A kind of device. Rates are the makers' peaks, without sparsity, in units per second.

    Attributes:
        name: on the command line.
        title: what its maker calls it.
        memory: bytes of a device; None for those of this machine, shared by all devices.
        flops: multiplications and additions by kind of number; empty if not known.
        bandwidth: bytes between memory and chip.
        link: bytes that a device sends to others of its host while it receives as many.
        network: the same to devices of other hosts.
        per_host: how many devices a host has.
        description: what XLA must know of the device to compile for it; None for a CPU.
    """

    name: str
    title: str
    memory: int | None
    flops: Mapping[Kind, float] = dataclasses.field(default_factory=dict)
    bandwidth: float = 0.0
    link: float = 0.0
    network: float = 0.0
    per_host: int = 8
    description: str | None = None

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """XLA's options for a device that is not there, on which it cannot try kernels out.

        Without such trials, Triton fails on some products, for which it finds no tiles, and takes
        most of the time for the others. cuBLAS computes them instead.
        """
        if self.description is None:
            return {}
        return {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": "0"}


def _describe(
    title: str,
    *,
    capability: str,
    cores: int,
    memory: int,
    bandwidth: float,
    cache: int,
    clock: float,
    shared: int,
) -> str:
    """XLA's description of a GPU, as a text proto.

    Args:
        title: what its maker calls it.
        capability: the compute capability, such as "9.0".
        cores: streaming multiprocessors.
        memory: bytes.
        bandwidth: bytes a second between memory and chip.
        cache: bytes of the L2 cache.
        clock: GHz.
        shared: bytes of shared memory that a core has.
    """
    major, minor = capability.split(".")
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared - 1024}
  core_count: {cores} fpus_per_core: {64 if capability == "8.0" else 128}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{title}"
"""


# A 400 Gb/s network card for each device, as in the makers' own servers; 200 Gb/s for the A100.
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(name="cpu", title="simulated devices", memory=None),
        Target(
            name="a100",
            title="NVIDIA A100 80 GB",
            memory=85_095_874_560,
            flops={"half": 312e12, "tf32": 156e12, "float32": 19.5e12, "float64": 19.5e12},
            bandwidth=2.039e12,
            link=300e9,
            network=25e9,
            description=_describe(
                "NVIDIA A100-SXM4-80GB",
                capability="8.0",
                cores=108,
                memory=85_095_874_560,
                bandwidth=2.039e12,
                cache=41_943_040,
                clock=1.41,
                shared=167_936,
            ),
        ),
        Target(
            name="h100",
            title="NVIDIA H100 80 GB",
            memory=84_929_347_584,
            flops={"half": 989e12, "tf32": 494e12, "float32": 67e12, "float64": 67e12},
            bandwidth=3.35e12,
            link=450e9,
            network=50e9,
            description=_describe(
                "NVIDIA H100 80GB HBM3",
                capability="9.0",
                cores=132,
                memory=84_929_347_584,
                bandwidth=3.35232e12,
                cache=52_428_800,
                clock=1.98,
                shared=233_472,
            ),
        ),
        Target(
            name="h200",
            title="NVIDIA H200 141 GB",
            memory=150_110_011_392,
            flops={"half": 989e12, "tf32": 494e12, "float32": 67e12, "float64": 67e12},
            bandwidth=4.8e12,
            link=450e9,
            network=50e9,
            description=_describe(
                "NVIDIA H200",
                capability="9.0",
                cores=132,
                memory=150_110_011_392,
                bandwidth=4.8e12,
                cache=52_428_800,
                clock=1.98,
                shared=233_472,
            ),
        ),
        Target(
            name="b200",
            title="NVIDIA B200 180 GB",
            memory=191_514_411_008,
            flops={"half": 2250e12, "tf32": 1125e12, "float32": 75e12, "float64": 37e12},
            bandwidth=8e12,
            link=900e9,
            network=50e9,
            description=_describe(
                "NVIDIA B200",
                capability="10.0",
                cores=148,
                memory=191_514_411_008,
                bandwidth=8e12,
                cache=132_644_864,
                clock=1.965,
                shared=233_472,
            ),
        ),
    )
}
