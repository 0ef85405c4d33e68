"""What the trainer adds to a hand-written loop: the same batches, the same step, jitted by hand."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import constrainx as cx
from benchmarks.report import Goal, Report, Table
from constrainx.models import MLP, LeNet

SEED = 0


def run(*, quick: bool) -> Report:
    """Times both loops in turns, and takes the best of several."""
    steps, rounds = (20, 1) if quick else (300, 5)
    rng = np.random.default_rng(0)
    images = {
        "x": rng.normal(size=(2048, 28, 28, 1)).astype(np.float32),
        "y": rng.integers(0, 10, 2048),
    }
    vectors = {
        "x": rng.normal(size=(4096, 64)).astype(np.float32),
        "y": rng.integers(0, 10, 4096),
    }
    problems: dict[str, tuple[Callable[[], nnx.Module], Any, int]] = {
        "MLP, width 256, batch 128": (
            lambda: MLP((64, 256, 256, 10), rngs=nnx.Rngs(SEED)), vectors, steps,
        ),
        "LeNet, batch 64": (lambda: LeNet(rngs=nnx.Rngs(SEED)), images, steps // 3),
    }  # fmt: skip
    rows, goals = [], []
    for name, (make, arrays, count) in problems.items():
        data = cx.data.arrays(arrays, batch=int(name.split()[-1]), seed=SEED)
        by_hand, ours, waited = [], [], 0.0
        for _ in range(rounds):
            by_hand.append(_by_hand(make(), data, count))
            seconds, waited = _by_trainer(make(), data, count)
            ours.append(seconds)
        ratio = min(ours) / min(by_hand)
        rows.append((name, 1e3 * min(by_hand), 1e3 * min(ours), ratio, 100 * waited))
        goals.append(
            Goal(f"{name}: within 5 % of a hand-written loop", f"{ratio:.3f}", ratio <= 1.05)
        )
    columns = {"problem": "", "by hand, ms": ".3f", "trainer, ms": ".3f", "ratio": ".3f"}
    return Report(
        name="loop",
        setting=f"Adam, cross-entropy, best of {rounds} runs of up to {steps} steps in turns.",
        tables=[Table("A step, all included", {**columns, "waiting for data, %": ".1f"}, rows)],
        goals=goals,
    )


def _loss(model: Any, batch: Any) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return losses.mean()


def _by_hand(model: nnx.Module, data: cx.data.Batches, steps: int) -> float:
    """Seconds a step."""
    graph, state = nnx.split((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(_loss)(model, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    start = 0.0
    for number, batch in enumerate(itertools.islice(data.from_step(0), steps + 1)):
        state, loss = step(state, batch)
        if number == 0:
            jax.block_until_ready(loss)
            start = time.perf_counter()
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / steps


class _Waited(cx.Callback):
    """The share of the time spent waiting for data."""

    def __init__(self) -> None:
        self.share = 0.0

    def on_log(self, step: int, metrics: Any) -> None:  # noqa: ARG002
        self.share = metrics.get("data_wait", 0.0)


def _by_trainer(model: nnx.Module, data: cx.data.Batches, steps: int) -> tuple[float, float]:
    """Seconds a step, and the share spent waiting for data."""
    waited = _Waited()
    result = cx.Trainer(
        model=model,
        loss=_loss,
        optimizer=optax.adam(1e-3),
        data=data,
        steps=steps + 1,
        devices=1,
        logging=cx.Logging(every=steps + 1, callbacks=[waited], progress=False),
    ).fit()
    return result.seconds / steps, waited.share
