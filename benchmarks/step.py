"""What a constraint adds to a training step, from one row on 50 million parameters to 128 rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import constrainx as cx
from benchmarks.measure import best_times, compile_for
from benchmarks.report import Goal, Report, Table
from constrainx.models import MLP
from constrainx.recipes import o3_inertia

BATCH = 128


def run(*, quick: bool) -> Report:
    """Times steps with and without constraints."""
    rounds = 3 if quick else 15
    scalar, scalar_goal = _scalar((20, 25) if quick else (2000, 2500), rounds)
    rows, rows_goals = _inertia(16 if quick else 384, rounds)
    return Report(
        name="step",
        setting=(
            "float32. Scalar: Adam's update and its application on ten leaves, against the same "
            "with `cx.constrain` and one row. Inertia: a whole training step of the recipe's "
            "network, batch 128."
        ),
        tables=[scalar, rows],
        goals=[scalar_goal, *rows_goals],
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

        return compile_for(apply, params, optimizer.init(params)), optimizer.init(params)

    plain = optax.with_extra_args_support(optax.adam(1e-3))
    contestants = {
        "Adam": update(plain),
        "Adam, constrained": update(cx.constrain(plain, budget)),
        "Adam, constrained, its metric": update(
            cx.constrain(plain, budget, method=cx.NullSpace(metric="optimizer"))
        ),
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

        return compile_for(run, state, jax.random.key(0)), state

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
