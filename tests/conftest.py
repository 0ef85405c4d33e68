"""Eight simulated devices for the whole session; most tests use the first alone."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Nearly all of the time is compilation, and what is compiled runs once.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)

import jax
import pytest


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
