"""What a constraint adds to a training step, from one row on 50 million parameters to 128 rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import constrainx as cx
from benchmarks.measure import best_times, compiled
from benchmarks.report import Goal, Report, Table
from constrainx.models import MLP
from constrainx.recipes import o3_inertia

BATCH = 128


def run(*, quick: bool) -> Report:
    """Times steps with and without constraints."""
    rounds = 3 if quick else 15
    scalar, scalar_goal = _scalar((20, 25) if quick else (2000, 2500), rounds)
    rows, rows_goals = _inertia(16 if quick else 384, rounds)
    images, images_goal = _images(8 if quick else BATCH, rounds)
    return Report(
        name="step",
        setting=(
            "float32. Scalar: Adam's update and its application on ten leaves, against the same "
            "with `cx.constrain` and one row. Inertia: a whole training step of the recipe's "
            "network, batch 128. Images: the features of a small LeNet, all images with three "
            "rotations, projected by the Gram matrix of 16 rows or one row, and by LSMR to 1e-6."
        ),
        tables=[scalar, rows, images],
        goals=[scalar_goal, *rows_goals, images_goal],
    )


def _scalar(shape: tuple[int, int], rounds: int) -> tuple[Table, Goal]:
    keys = jax.random.split(jax.random.key(0), 10)
    params = {f"layer {i}": 0.01 * jax.random.normal(key, shape) for i, key in enumerate(keys)}
    grads = jax.tree.map(jnp.sin, params)

    def budget(params: Any) -> jax.Array:
        return sum(jnp.sum(leaf * leaf) for leaf in params.values()) - 1.0

    def update(optimizer: optax.GradientTransformationExtraArgs) -> tuple[Callable, Any]:
        def apply(params: Any, state: Any) -> Any:
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return compiled(apply, params, optimizer.init(params)), optimizer.init(params)

    plain = optax.with_extra_args_support(optax.adam(1e-3))
    contestants = {
        "Adam": update(plain),
        "Adam, constrained": update(cx.constrain(plain, budget)),
        "Adam, constrained, its metric": update(cx.constrain(plain, budget, metric="optimizer")),
        "null space, then Adam": update(optax.chain(cx.nullspace(budget), plain)),
    }
    calls = {name: lambda f=f, s=s: f(params, s) for name, (f, s) in contestants.items()}
    seconds = best_times(calls, rounds=rounds)
    base = seconds["Adam"]
    table = Table(
        f"One row on {10 * shape[0] * shape[1]:,} parameters",
        {"step": "", "ms": ".1f", "ratio": ".2f"},
        [(name, 1e3 * time, time / base) for name, time in seconds.items()],
    )
    ratio = seconds["Adam, constrained"] / base
    return table, Goal(
        "one row costs at most 2.0 times Adam alone", f"{ratio:.2f} times", ratio <= 2.0
    )


def _inertia(width: int, rounds: int) -> tuple[Table, list[Goal]]:
    x = jax.random.normal(jax.random.key(0), (BATCH, 20))
    batch = {"x": x}

    def step(reduce: Any, examples: int | None = None) -> tuple[Callable, Any]:
        model = MLP((20, width, width, width, 9), rngs=nnx.Rngs(0))
        optimizer = optax.adam(1e-3)
        if reduce is not None:
            constraint = cx.Equivariance(
                o3_inertia.GROUP,
                input=o3_inertia.INPUT,
                output=o3_inertia.OUTPUT,
                reduce=reduce,
                examples=examples,
            )
            optimizer = optax.chain(cx.nullspace(constraint, model=model), optimizer)
        graph, state = nnx.split((model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)))

        def run(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            model, optimizer = nnx.merge(graph, state)
            target = o3_inertia.inertia(x)
            loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - target) ** 2))(model)
            extra = {} if reduce is None else {"batch": batch, "key": key}
            optimizer.update(model, grads, **extra)
            return nnx.state((model, optimizer)), loss

        return compiled(run, state, jax.random.key(0)), state

    contestants = {
        "unconstrained": step(None),
        "9 rows, the signed mean": step("mean"),
        "9 rows, of 32 examples": step("mean", 32),
        "1 row, rms": step("rms"),
        **{f"{rows} rows, norms": step(cx.Norm(groups=rows)) for rows in (16, 32, 64, 128)},
    }
    key = jax.random.key(1)
    calls = {name: lambda f=f, s=s: f(s, key) for name, (f, s) in contestants.items()}
    seconds = best_times(calls, rounds=4 * rounds)
    base = seconds["unconstrained"]
    ratios = {name: time / base for name, time in seconds.items()}
    table = Table(
        f"Inertia, MLP of width {width}, a training step",
        {"constraint": "", "ms": ".2f", "ratio": ".2f"},
        [(name, 1e3 * time, ratios[name]) for name, time in seconds.items()],
    )
    nine, many = ratios["9 rows, the signed mean"], ratios["64 rows, norms"]
    growth = ratios["128 rows, norms"] / ratios["16 rows, norms"]
    return table, [
        Goal("nine rows cost at most 4 plain steps", f"{nine:.2f}", nine <= 4.0),
        Goal("64 rows cost at most 6 plain steps", f"{many:.2f}", many <= 6.0),
        Goal("8 times the rows cost far less than 8 times", f"{growth:.2f} times", growth <= 3.0),
    ]


class Features(nnx.Module):
    """The convolutions of a small LeNet."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, 8, (5, 5), rngs=rngs)
        self.second = nnx.Conv(8, 16, (5, 5), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Feature maps of a quarter of the size."""
        x = nnx.avg_pool(nnx.relu(self.first(x)), (2, 2), strides=(2, 2))
        return nnx.avg_pool(nnx.relu(self.second(x)), (2, 2), strides=(2, 2))


def _images(images: int, rounds: int) -> tuple[Table, Goal]:
    batch = {"x": jax.random.uniform(jax.random.key(0), (images, 28, 28, 1))}
    choices = {
        "LSMR to 1e-6": (cx.Norm(groups=8 if images < 16 else 16), cx.LSMR(rtol=1e-6)),
        "LSMR, inexact": (cx.Norm(groups=8 if images < 16 else 16), cx.LSMR(rtol=1e-3)),
        "Gram matrix": (cx.Norm(groups=8 if images < 16 else 16), "auto"),
        "one row": ("rms", "auto"),
    }

    def projected(reduce: Any, solver: Any) -> tuple[Callable, Any]:
        model = Features(nnx.Rngs(0))
        constraint = cx.Equivariance(cx.groups.Cyclic(4), reduce=reduce, gamma=1.0)
        optimizer = cx.constrain(optax.sgd(0.0), constraint, model=model, solver=solver)
        params = nnx.state(model, nnx.Param)
        zero = jax.tree.map(jnp.zeros_like, params)

        def step(params: Any) -> Any:
            updates, state = optimizer.update(zero, optimizer.init(params), params, batch=batch)
            moved = optax.apply_updates(params, updates)
            return moved, next(iter(cx.reports(state).values())).violation

        return compiled(step, params), params

    contestants = {name: projected(*choice) for name, choice in choices.items()}
    calls = {name: lambda f=f, p=p: f(p) for name, (f, p) in contestants.items()}
    seconds = best_times(calls, rounds=max(2, rounds // 5))
    violations = {}
    for name, (function, params) in contestants.items():
        for _ in range(12):
            params, violation = function(params)
        violations[name] = float(violation)
    slowest = seconds["LSMR to 1e-6"]
    table = Table(
        f"C4 equivariance of convolutions, {images} images × 3 rotations",
        {"solver": "", "ms a step": ".1f", "faster": ".2f", "violation after 12 steps": ".1e"},
        [(n, 1e3 * time, slowest / time, violations[n]) for n, time in seconds.items()],
    )
    ratio = slowest / seconds["Gram matrix"]
    return table, Goal(
        "at least 5 times faster a step than LSMR to 1e-6", f"{ratio:.1f} times", ratio >= 5.0
    )
