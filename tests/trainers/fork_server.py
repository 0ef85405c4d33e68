"""Forks a process for each training run that a test wants to kill, so that each starts in a second.

Reads one attempt per line from stdin, as JSON, and prints how its process ended. It must not use a
JAX backend itself: a process forked from one whose backend has started threads would hang.
"""

import hashlib
import json
import os
import pathlib
import resource
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import constrainx as cx
from tests.trainers import problems


class Heavy(nnx.Module):
    """A parameter that is too large for a limit on the size of files, even compressed."""

    def __init__(self):
        self.value = nnx.Param(np.random.default_rng(0).normal(size=100_000).astype(np.float32))


def weighted(model, batch):
    return jnp.mean(model.value[...]) * jnp.mean(batch["x"])


KINDS = {
    "net": lambda **options: problems.trainer(ema=0.9, **options),
    "heavy": lambda **options: problems.counter(model=Heavy(), loss=weighted, **options),
}


def digest(state):
    contents = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        contents.update(np.asarray(leaf).tobytes())
    return contents.hexdigest()[:16]


class Diary(cx.Callback):
    """Prints a line for each step, and kills or limits its own process when the attempt says so."""

    def __init__(self, attempt):
        self._attempt = attempt
        self._saves = 0

    def on_start(self, trainer, step):
        self._trainer = trainer
        self._write(kind="start", step=step, digest=digest(trainer.state))
        if "kill_after" in self._attempt:
            self._kill_in(self._attempt["kill_after"])

    def on_log(self, step, metrics):
        self._write(kind="step", step=step, digest=digest(self._trainer.state))
        time.sleep(self._attempt.get("sleep", 0.0))
        limit = self._attempt.get("limits", {}).get(str(step))
        if limit is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            soft = resource.RLIM_INFINITY if limit < 0 else limit
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def on_save(self, step):
        self._saves += 1
        if self._saves == self._attempt.get("kill_at_save"):
            self._kill_in(self._attempt["delay"])

    def on_event(self, step, message):
        self._write(kind="event", step=step, message=message)

    def on_end(self, step, reason):
        self._write(kind="end", step=step, reason=reason)

    def _kill_in(self, seconds):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def _write(self, **line):
        # To a pipe, which no limit on the size of files applies to.
        sys.stdout.write(json.dumps({"pid": os.getpid(), **line}) + "\n")
        sys.stdout.flush()


def train(attempt):
    run = pathlib.Path(attempt["run"])
    trainer = KINDS[attempt.get("kind", "net")](
        run=run,
        steps=attempt["steps"],
        save_every=attempt["save_every"],
        keep=cx.Keep(last=2),
        on_save_error=attempt.get("on_save_error", "stop"),
        log_every=1,
        optimizer=optax.adam(0.05),
        callbacks=[Diary(attempt)],
    )
    if attempt.get("resume"):
        trainer.restore()
    result = trainer.fit()
    if result.unsaved:
        said = {"kind": "result", "saved": result.saved, "unsaved": result.unsaved}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


def main():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    while line := sys.stdin.readline():
        attempt = json.loads(line)
        pid = os.fork()
        if pid == 0:
            train(attempt)
            return
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        sys.stdout.write(json.dumps({"kind": "exit", "code": code}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
