"""Memory is kept from step to step."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from constrainx.runtime import keep_memory

print(keep_memory())
import jax, jax.numpy as jnp

double = jax.jit(lambda x: 2 * x)
x = jnp.ones(2**24)
for _ in range(30):  # memory that is freed late is used again from here on
    double(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    double(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_a_step_asks_for_no_new_pages():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    was_possible, faults = result.stdout.split()
    if was_possible == "False":
        pytest.skip("needs glibc")
    # Ten results of 64 MiB are 163,840 pages.
    assert int(faults) < 20_000
