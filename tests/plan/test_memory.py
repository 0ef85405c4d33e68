"""A plan's memory against what a run takes from the machine, on simulated devices."""

import json
import os
import subprocess
import sys

import pytest

# XLA's library for products on CPUs keeps packed copies that are in no account; GPUs have none.
FLAGS = "--xla_force_host_platform_device_count=2 --xla_cpu_experimental_ynn_fusion_type="
SCRIPT = """
import ctypes, gc, json, pathlib, sys
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import constrainx as cx
from constrainx.models import MLP
from constrainx.plan import read_memory

class Odd(cx.Constraint):
    def residual(self, model, batch, *, key):
        return model(batch["x"]) + model(-batch["x"])

def read(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

def masked(model, batch, key):
    return plain(cx.masks.sample(model, key), batch)

def plain(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

def measure(fsdp, batch, constraint):
    model, loss = MLP((64, 1536, 1536, 1), rngs=nnx.Rngs(0)), plain
    if isinstance(constraint, cx.MaskBudget):
        model, loss = cx.masks.add_masks(model), masked
    x = np.ones((batch, 64), np.float32)
    trainer = cx.Trainer(
        model=model, loss=loss, optimizer=optax.adam(1e-3), steps=1, constraints=[constraint],
        data=cx.data.arrays({"x": x, "y": x[:, :1]}, batch=batch),
        devices=cx.Devices(2, fsdp=fsdp), logging=cx.Logging(progress=False),
    )
    compiled = trainer.lower().compile()
    rows = next(trainer.data.from_step(0))
    host = jax.device_get(trainer.state)
    (_, totals, _), _ = compiled.in_avals
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), totals)
    sharding = trainer.sharding
    del trainer, model
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = read("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    state, totals = sharding.place(host), jax.device_put(zeros, sharding.whole)
    for _ in range(2):
        state, totals, loss = compiled(state, totals, sharding.place_batch(rows))
        jax.block_until_ready(loss)
    return 2 * read_memory(compiled).peak, read("VmHWM") - before

# The first run of a process also starts threads.
measure(1, 16, Odd(reduce="rms"))
print(json.dumps([measure(2, 64, cx.MaskBudget(0.5)), measure(1, 1024, Odd(reduce=cx.Norm(8)))]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_that_of_a_run():
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"},
    )
    assert ended.returncode == 0, ended.stderr
    for planned, used in json.loads(ended.stdout.splitlines()[-1]):
        assert planned > 5e7  # small figures would drown in what a process takes anyway
        assert used == pytest.approx(planned, rel=0.15), (planned, used)
