"""A run small enough for every layout of devices and processes."""

import json
import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import constrainx as cx
from constrainx.models import MLP
from constrainx.recipes.l0_imagenet import L0ImageNet
from constrainx.runtime import Callback, RunError
from constrainx.runtime import _distributed as distributed
from constrainx.runtime import _sharding as sharding
from tests.trainers.problems import trainer as grouped_trainer

# Small kernels count as large, so that there is something to split.
SPLIT = 64
# With a large γ constraints soon hold to rounding, which then decides where the norm of a residual
# points: a change of 1e-7 in the parameters, on one device, grows a thousandfold in 50 steps.
GAMMA = 0.1


class Odd(cx.Constraint):
    def residual(self, model, batch, *, key):
        return model(batch["x"]) + model(-batch["x"])


class Losses(Callback):
    def __init__(self):
        self.steps, self.values = [], []

    def on_log(self, step, metrics):
        self.steps.append(step)
        self.values.append(metrics["loss"])


def trainer(reduce=None, batch=64, **settings):
    x = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
    reduce = cx.Norm(groups=8) if reduce is None else reduce
    return grouped_trainer(
        **{
            "model": MLP((8, 32, 32, 1), rngs=nnx.Rngs(0)),
            "loss": lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2),
            "optimizer": optax.adam(3e-3),
            "data": cx.data.arrays({"x": x, "y": np.sin(x[:, :1])}, batch=batch),
            "constraints": [Odd(gamma=GAMMA, reduce=reduce, placement="twice")],
            "steps": 50,
            "log_every": 1,
            "devices": None,
            **settings,
        }
    )


def evaluation():
    """Settings for an evaluation with a last batch that is not full."""
    x = np.random.default_rng(1).normal(size=(100, 8)).astype(np.float32)
    return {
        "evaluation": cx.data.arrays({"x": x, "y": np.sin(x[:, :1])}, batch=64),
        "metrics": {"error": lambda model, batch: jnp.abs(model(batch["x"]) - batch["y"])},
    }


def losses(**settings):
    listener = Losses()
    trainer(callbacks=[listener], **settings).fit()
    return np.asarray(listener.values)


def refuse_misfits(run):
    """What is said about processes that differ in their settings or in their folders."""
    is_other = jax.process_index() > 0
    cases = [
        {"run": run, "seed": int(is_other)},
        {"run": "/proc/run" if is_other else run},
        {"run": f"{run}-other" if is_other else run},
    ]
    said = []
    for case in cases:
        try:
            trainer(steps=1, **case).fit()
        except RunError as error:
            said.append(str(error))
    return said


def run_apart(out, flags, function, *arguments):
    """Calls a function in a process that was forked for it, with its output in files."""
    for path, number in ((out, 1), (f"{out}.error", 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ["XLA_FLAGS"] = flags
    function(*arguments)


def join_cluster():
    """Joins a cluster although there is none."""
    names = ("SLURM", "OMPI", "KUBERNETES", "JAX_", "TPU", "PMI")
    for name in [name for name in os.environ if name.startswith(names)]:
        del os.environ[name]
    with distributed.supervise("auto"):
        pass


class KilledAfter(Callback):
    """Kills its process after a step, once the checkpoint of an earlier one is complete."""

    def __init__(self, run, *, step, saved):
        self.step, self.saved = step, pathlib.Path(run) / "checkpoints" / str(saved)

    def on_log(self, step, metrics):
        if step == self.step:
            while not self.saved.exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


def sparse_trainer(*, callbacks=(), run=None, **layout):
    """A small Swin on half of its weights, on made-up images."""
    # In bfloat16 rounding decides which weights are the most important ones.
    recipe = L0ImageNet(
        size="smoke", data="synthetic", precision="float32", save_every=2, log_every=1, **layout
    )
    return recipe.trainer(run=run, callbacks=callbacks, progress=False)


def train_sparse(spec, run):
    """One process of a sparse run that is killed on its way."""
    sharding.SMALLEST_SPLIT = SPLIT
    with distributed.supervise(spec, run=run):
        killed = KilledAfter(run, step=6, saved=4)
        sparse_trainer(callbacks=[killed], run=run, fsdp=4).fit()


def hold_parts(spec, run):
    """What one process holds of the large arrays: at the start, when trained, and restored."""
    sharding.SMALLEST_SPLIT = SPLIT
    with distributed.supervise(spec, run=run):
        layout = {"fsdp": len(jax.devices())}
        first = trainer(run=run, steps=2, **layout)
        held = [shares(first.state)]
        first.fit()
        second = trainer(run=run, steps=2, **layout)
        second.restore()
        held += [shares(first.state), shares(second.state)]
        restored = zip(jax.tree.leaves(first.state), jax.tree.leaves(second.state), strict=True)
        is_same = all(
            np.array_equal(one.data, other.data)
            for mine, yours in restored
            for one, other in zip(mine.addressable_shards, yours.addressable_shards, strict=True)
        )
        sys.stdout.write(json.dumps({"held": held, "is_same": is_same}) + "\n")


def shares(state):
    """Which share of each large array this process holds."""
    large = [leaf for leaf in jax.tree.leaves(state) if leaf.size >= SPLIT]
    return [sum(shard.data.size for shard in leaf.addressable_shards) / leaf.size for leaf in large]


def main(spec, run, steps, action):
    """One process of several."""
    sharding.SMALLEST_SPLIT = SPLIT
    if action == "impatient":
        distributed.JOIN_SECONDS = 2
    if action == "short heartbeats":
        distributed.HEARTBEAT_SECONDS = 6
    with distributed.supervise(spec, run=run):
        if action == "misfits":
            sys.stdout.write(json.dumps(refuse_misfits(run)) + "\n")
            return
        listener = Losses()
        # No process has all of a large parameter.
        layout = {"fsdp": len(jax.devices())}
        made = trainer(
            run=run, steps=steps, save_every=10, callbacks=[listener], **layout, **evaluation()
        )
        result = made.fit(on_signal="return")
        outcome = {"losses": listener.values, "metrics": result.metrics}
        outcome |= {"reason": result.reason, "step": result.step}
        sys.stdout.write(json.dumps(outcome) + "\n")
