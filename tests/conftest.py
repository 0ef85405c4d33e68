"""Eight simulated devices, and array annotations that are enforced, for the whole session."""

import ctypes
import gc
import os
import pathlib
import resource
import sys
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# Nearly all of the time is compilation, and what is compiled runs once.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)

import jax
import pytest
from jaxtyping import install_import_hook

from . import array_annotations as array_annotations  # where the hook looks for it

# Stays for the session: most modules are imported by the tests that need them.
install_import_hook("constrainx", "tests.array_annotations.check_arrays")


# Many tests compile the same program from functions of their own. Each worker has its own folder,
# because JAX does not write to it atomically.
_compiled = tempfile.TemporaryDirectory()
jax.config.update("jax_compilation_cache_dir", _compiled.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


# What a worker may hold beyond its last clean-up. Compiled programs are several gigabytes in all.
GROWTH = 2**30
_held_after_clean_up = 0


def _measure_memory():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def pytest_runtest_teardown(item, nextitem):
    """Between files, forgets compiled programs if they have become many."""
    global _held_after_clean_up
    if nextitem is not None and nextitem.path == item.path:
        return
    if sys.platform == "linux" and _measure_memory() > _held_after_clean_up + GROWTH:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        _held_after_clean_up = _measure_memory()


def pytest_sessionfinish():
    _compiled.cleanup()
