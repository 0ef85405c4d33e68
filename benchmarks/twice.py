"""What projecting twice adds to Adam: one row on 50 million parameters, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import constrainx as cx
from benchmarks.measure import clock
from benchmarks.report import Goal, Report, Table

LEAVES = 10
# The row of a mask budget is the same for all parameters; others lie in memory.
MOST = {"stored row, twice": 2.2, "mean, twice": 1.6}


class Contestant(NamedTuple):
    """A compiled step on donated buffers: (parameters, state, gradient, row) ↦ the first two."""

    step: jax.stages.Compiled
    init: Callable[[Any], Any]


def run(*, quick: bool) -> Report:
    """Times Adam with and without a row, in turns."""
    shape, rounds = ((20, 25), 2) if quick else ((2000, 2500), 6)
    keys = jax.random.split(jax.random.key(0), LEAVES)
    params = {f"layer {i}": 0.01 * jax.random.normal(k, shape) for i, k in enumerate(keys)}
    grads, row = jax.tree.map(jnp.sin, params), jax.tree.map(jnp.cos, params)
    contestants = {
        name: _compile(make, params, grads, row) for name, make in all_optimizers().items()
    }
    seconds = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds):
        for name, contestant in contestants.items():
            seconds[name] = min(seconds[name], _time(contestant, params, grads, row))
    values = {
        "stored row": jax.jit(_along(row)).lower(params).compile(),
        "mean": jax.jit(_mean).lower(params).compile(),
    }
    own = {name: _time_value(value, params, rounds) for name, value in values.items()}
    base = seconds["Adam"]
    count = LEAVES * shape[0] * shape[1]
    rows, goals = [], []
    for name, contestant in contestants.items():
        kind = name.partition(",")[0]
        apart = (seconds[name] - own.get(kind, 0.0)) / base
        temporary = contestant.step.memory_analysis().temp_size_in_bytes / 1e6
        rows.append((name, 1e3 * seconds[name], seconds[name] / base, apart, temporary))
        if name in MOST:
            wanted = f"{name}: at most {MOST[name]} times Adam alone, besides the row itself"
            goals.append(Goal(wanted, f"{apart:.2f} times", apart <= MOST[name]))
    columns = {"step": "", "ms": ".1f", "/ Adam": ".2f", "besides the row": ".2f", "MB": ".0f"}
    return Report(
        name="twice",
        setting=(
            f"float32, {count:,} parameters in {LEAVES} leaves, the gradient given, buffers of "
            f"parameters and state donated; best of {2 * rounds} in turns. 'besides the row' "
            "leaves out the time in which the value of the row is computed, "
            + ", ".join(f"{1e3 * own[name]:.1f} ms for the {name}" for name in own)
            + "; a stored row needs no other. 'MB' is temporary memory, which the system clears "
            "page by page in every step."
        ),
        tables=[Table("Adam and one row", columns, rows)],
        goals=goals,
    )


def all_optimizers() -> dict[str, Callable[[Any], optax.GradientTransformationExtraArgs]]:
    """Optimizers by name, each for a given row."""
    adam = optax.with_extra_args_support(optax.adam(1e-3))

    def constrain(function: Callable, placement: Any) -> optax.GradientTransformationExtraArgs:
        return cx.constrain(adam, function, method=cx.NullSpace(placement=placement))

    return {
        "Adam": lambda row: adam,  # noqa: ARG005
        "stored row, once": lambda row: constrain(_along(row), "gradient"),
        "stored row, twice": lambda row: constrain(_along(row), "twice"),
        "mean, once": lambda row: constrain(_mean, "gradient"),  # noqa: ARG005
        "mean, twice": lambda row: constrain(_mean, "twice"),  # noqa: ARG005
    }


def _along(row: Any) -> Callable[[Any], jax.Array]:
    return lambda params: sum(jnp.sum(row[name] * params[name]) for name in params) - 1.0


def _mean(params: Any) -> jax.Array:
    leaves = params.values()
    return sum(jnp.sum(leaf) for leaf in leaves) / sum(leaf.size for leaf in leaves) - 0.5


def _compile(make: Callable, params: Any, grads: Any, row: Any) -> Contestant:
    def step(params: Any, state: Any, grads: Any, row: Any) -> tuple[Any, Any]:
        updates, state = make(row).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    init = make(row).init
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, init(params), grads, row)
    return Contestant(lowered.compile(), init)


def _time(contestant: Contestant, params: Any, grads: Any, row: Any) -> float:
    """Seconds of the faster of two steps, after one that is not measured."""
    carry = jax.tree.map(jnp.array, (params, contestant.init(params)))
    carry = jax.block_until_ready(contestant.step(*carry, grads, row))
    best = float("inf")
    for _ in range(2):
        begin = clock()
        carry = jax.block_until_ready(contestant.step(*carry, grads, row))
        best = min(best, clock() - begin)
    return best


def _time_value(value: jax.stages.Compiled, params: Any, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds + 1):
        begin = clock()
        jax.block_until_ready(value(params))
        best = min(best, clock() - begin)
    return best
