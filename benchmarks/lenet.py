"""A LeNet whose features turn with the image: rows by patches, against iterations of LSMR."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import constrainx as cx
from benchmarks.measure import best_times, compile_for
from benchmarks.report import Goal, Report, Table
from constrainx.models import LeNet


def run(*, quick: bool) -> Report:
    """Times a training step, and trains with each solver for a few steps."""
    images, rounds, steps = (4, 1, 2) if quick else (128, 1, 3)
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(images, 28, 28, 1)).astype(np.float32),
        "y": rng.integers(0, 10, images),
    }
    contestants = {
        "unconstrained": _step(None, "auto", batch),
        "one row, rms": _step("rms", "auto", batch),
        "a row an image": _step("norm", "auto", batch),
        "a row an image, LSMR(1e-3)": _step("norm", cx.LSMR(rtol=1e-3), batch),
        "a row an image, LSMR(1e-6)": _step("norm", cx.LSMR(rtol=1e-6), batch),
    }
    calls = {name: lambda f=f, s=s: f(s, batch) for name, (f, s) in contestants.items()}
    seconds = best_times(calls, rounds=rounds)
    after = {name: _violation(*found, batch, steps) for name, found in contestants.items()}
    base = seconds["unconstrained"]
    table = Table(
        f"LeNet under C4, {images} images and 3 rotations, a training step",
        {"step": "", "ms": ".0f", "ratio": ".1f", f"violation after {steps}": ".4f"},
        [(name, 1e3 * s, s / base, after[name]) for name, s in seconds.items()],
    )
    tight, ours = "a row an image, LSMR(1e-6)", "a row an image"
    speed, ratio = seconds[tight] / seconds[ours], after[ours] / after[tight]
    return Report(
        name="lenet",
        setting="float32, Adam after the null space, gamma 0.5, random images.",
        tables=[table],
        goals=[
            Goal("at least 5 times faster than LSMR(1e-6)", f"{speed:.1f} times", speed >= 5),
            Goal("at equal violation, within 2 %", f"{ratio:.4f}", abs(ratio - 1) <= 0.02),
        ],
    )


def _constraint(reduce: Any) -> cx.Constraint:
    return cx.Equivariance(
        cx.groups.Cyclic(4), of=lambda m, x: m.features(x), reduce=reduce, gamma=0.5
    )


def _step(reduce: Any, solver: Any, batch: dict[str, np.ndarray]) -> tuple[Callable, Any]:
    model = LeNet(rngs=nnx.Rngs(0))
    optimizer = optax.adam(1e-3)
    if reduce is not None:
        first = cx.nullspace(_constraint(reduce), model=model, solver=solver)
        optimizer = optax.chain(first, optimizer)
    graph, state = nnx.split((model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)))

    def run(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)

        def loss(model: LeNet) -> jax.Array:
            logits = model(batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        extra = {} if reduce is None else {"batch": batch}
        optimizer.update(model, grads, **extra)
        return nnx.state((model, optimizer)), value

    return compile_for(run, state, batch), state


def _violation(step: Callable, state: Any, batch: dict[str, np.ndarray], steps: int) -> float:
    for _ in range(steps):
        state, _ = step(state, batch)
    model = LeNet(rngs=nnx.Rngs(0))
    nnx.update(model, state[0])
    return float(_constraint("norm").violation(model, batch, jax.random.key(0)))
