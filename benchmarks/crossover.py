"""Gram matrix or iterations: which is faster for rows that share a batch, and from how many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import constrainx as cx
from benchmarks.measure import best_times, compile_for
from benchmarks.report import Goal, Report, Table
from constrainx.models import MLP
from constrainx.step._linearise import INEXACT, ROWS_WITH_STORED_GRADIENTS


class Odd(cx.Constraint):
    """f(−x) = −f(x)."""

    def residual(self, model: Any, batch: Any, *, key: jax.Array) -> jax.Array:  # noqa: ARG002
        """f(x) + f(−x)."""
        return model(batch) + model(-batch)


def run(*, quick: bool) -> Report:
    """Times one projection for growing numbers of rows."""
    width, counts = (16, (4, 16)) if quick else (256, (4, 8, 16, 32, 64, 128, 256))
    x = jax.random.normal(jax.random.key(0), (128, 16))
    rows = []
    for count in counts:
        calls = {
            "gram": _projection(x, width, count, "gram"),
            "inexact": _projection(x, width, count, INEXACT),
            "tight": _projection(x, width, count, cx.LSMR(rtol=1e-6)),
        }
        seconds = best_times(calls, rounds=3 if quick else 5)
        ratio = seconds["inexact"] / seconds["gram"]
        rows.append((count, *(1e3 * seconds[name] for name in calls), ratio))
    wins = [count for count, *_, ratio in rows if ratio >= 1]
    largest = max(wins, default=0)
    return Report(
        name="crossover",
        setting=f"An MLP 16-{width}-{width}-8, batch 128, odd functions as random combinations.",
        tables=[
            Table(
                "Milliseconds of a projection",
                {
                    "rows": "d",
                    "Gram matrix": ".1f",
                    f"LSMR to {INEXACT.rtol:g}": ".1f",
                    "LSMR to 1e-6": ".1f",
                    "LSMR / Gram": ".2f",
                },
                rows,
            )
        ],
        goals=[]
        if quick
        else [
            Goal(
                f'solver="auto" changes over at {ROWS_WITH_STORED_GRADIENTS} rows, within a factor '
                "of two of where it pays",
                f"the Gram matrix is faster up to {largest} rows",
                largest / 2 <= ROWS_WITH_STORED_GRADIENTS <= 2 * largest,
            )
        ],
    )


def _projection(x: jax.Array, width: int, rows: int, solver: Any) -> Callable[[], Any]:
    model = MLP((16, width, width, 8), rngs=nnx.Rngs(0))
    constraint = cx.compose(Odd(reduce=cx.Sketch(rows=rows)), model=model)
    params = nnx.state(model, nnx.Param)
    update = jax.tree.map(lambda leaf: 1e-3 * jnp.cos(leaf), params)

    def step(params: Any, update: Any) -> Any:
        return cx.project(
            update, constraint, params, batch=x, key=jax.random.key(1), solver=solver
        ).update

    function = compile_for(step, params, update)
    return lambda: function(params, update)
