"""How the time and the memory of a step grow with parameters, rows and batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

import constrainx as cx
from benchmarks import report
from benchmarks.crossover import Odd
from benchmarks.measure import clock, compile_for, count_bytes
from benchmarks.report import Goal, Report, Table
from constrainx.models import MLP

# What a power law fitted to noisy times may miss of a straight line.
SLACK = 0.15
INPUTS = 16


class Case(NamedTuple):
    """One step: a function of its arguments, and how large it is."""

    size: int
    step: Callable[..., tuple[Any, jax.Array]]
    args: tuple[Any, ...]


class Sweep(NamedTuple):
    """Steps that differ in one size.

    Attributes:
        name: what they are.
        size: what grows.
        cases: from small to large.
    """

    name: str
    size: str
    cases: Iterator[Case]


class Growth(NamedTuple):
    """What a sweep found: a figure for each size."""

    sizes: list[int]
    seconds: list[float]
    bytes: list[int]
    iterations: list[int]


def run(*, quick: bool) -> Report:
    """Times one projection for growing sizes, and fits a power of the size."""
    rounds = 2 if quick else 7
    rows, fits, found = [], [], {}
    for sweep in _all_sweeps(quick=quick):
        growth = _measure(sweep.cases, rounds)
        label = f"{sweep.name}: {sweep.size}"
        found[label] = growth
        fits.append(
            (sweep.name, sweep.size, fit_power(growth.sizes, growth.seconds),
             fit_power(growth.sizes, growth.bytes))
        )  # fmt: skip
        rows += [
            (label, size, 1e3 * seconds, bytes_ / 1e6, iterations)
            for size, seconds, bytes_, iterations in zip(*growth, strict=True)
        ]
    return Report(
        name="growth",
        setting=(
            "float32. One projection of an update, compiled, best of "
            f"{rounds}; memory is that of arguments, results and temporary arrays. Budget: "
            "‖θ‖² = 1, on more parameters than caches hold. Others: an MLP that should be odd, "
            "with random combinations of residuals as rows, solved by LSMR to the default "
            "tolerance, or with norms over groups of examples, solved by the Gram matrix. "
            "Exponents p of size^p are fitted by least squares to the logarithms."
        ),
        tables=[
            Table(
                "Exponents",
                {"step": "", "grows": "", "time": ".2f", "memory": ".2f"},
                fits,
            ),
            Table(
                "A step",
                {"step": "", "size": ",d", "ms": ".2f", "MB": ".1f", "iterations": "d"},
                rows,
            ),
        ],
        goals=[
            Goal(
                f"{name}: no worse than linear in {size}",
                f"time {seconds:.2f}, memory {memory:.2f}",
                max(seconds, memory) <= 1 + SLACK,
            )
            for name, size, seconds, memory in fits
        ],
        plots={"growth": _draw(found)},
    )


def fit_power(sizes: Sequence[int], figures: Sequence[float]) -> float:
    """The exponent p for which figures are nearest to size^p, in logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(figures), 1)[0])


def _all_sweeps(*, quick: bool) -> Iterator[Sweep]:
    # Beyond the caches, in which a parameter takes a fifth of the time.
    budgets = (10**3, 10**4) if quick else tuple(n * 10**6 for n in (5, 10, 20, 50))
    counts = (16, 32) if quick else (16, 64, 256, 1024)
    width, batch = (8, 32) if quick else (256, 512)
    yield Sweep("budget, 1 row", "parameters", (_budget(size) for size in budgets))
    yield Sweep(
        f"LSMR, batch {batch}",
        "rows",
        (_odd(width, batch, cx.Sketch(rows=k), "rows", k) for k in counts),
    )
    if quick:
        return
    yield Sweep(
        f"Gram matrix, batch {batch}",
        "rows",
        (_odd(width, batch, cx.Norm(groups=k), "rows", k) for k in (16, 64, 256, 512)),
    )
    yield Sweep(
        "LSMR, 64 rows",
        "parameters",
        (_odd(w, 64, cx.Sketch(rows=64), "parameters") for w in (256, 512, 1024, 2048)),
    )
    batches = (128, 512, 2048)
    yield Sweep(
        "LSMR, 64 rows", "batch", (_odd(width, n, cx.Sketch(rows=64), "batch") for n in batches)
    )
    yield Sweep(
        "Gram matrix, 32 rows",
        "batch",
        (_odd(width, n, cx.Norm(groups=32), "batch") for n in batches),
    )


def _budget(size: int) -> Case:
    keys = jax.random.split(jax.random.key(0), 10)
    parameters = [jax.random.normal(key, (size // 500, 50)) / size**0.5 for key in keys]
    constraint = cx.compose(lambda p: sum(jnp.sum(leaf * leaf) for leaf in p) - 0.5)
    update = [1e-3 * jnp.sign(leaf) for leaf in parameters]

    def step(update: Any, parameters: Any) -> tuple[Any, jax.Array]:
        found = cx.project(update, constraint, parameters)
        return found.update, found.reports[constraint.names[0]].iterations

    return Case(size, step, (update, parameters))


def _odd(width: int, batch: int, reduce: Any, grows: str, rows: int = 0) -> Case:
    model = MLP((INPUTS, width, width, 8), rngs=nnx.Rngs(0))
    constraint = cx.compose(Odd(reduce=reduce), model=model)
    parameters = nnx.state(model, nnx.Param)
    update = jax.tree.map(lambda leaf: 1e-3 * jnp.cos(leaf), parameters)
    x = jax.random.normal(jax.random.key(0), (batch, INPUTS))

    def step(update: Any, parameters: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        key = jax.random.key(1)
        found = cx.project(update, constraint, parameters, batch=x, key=key)
        return found.update, found.reports[constraint.names[0]].iterations

    count = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    size = {"parameters": count, "rows": rows, "batch": batch}[grows]
    return Case(size, step, (update, parameters, x))


def _measure(cases: Iterator[Case], rounds: int) -> Growth:
    growth = Growth([], [], [], [])
    for case in cases:
        step = compile_for(case.step, *case.args)
        _, iterations = jax.block_until_ready(step(*case.args))
        best = float("inf")
        for _ in range(rounds):
            begin = clock()
            jax.block_until_ready(step(*case.args))
            best = min(best, clock() - begin)
        for series, figure in zip(
            growth, (case.size, best, count_bytes(step), int(iterations)), strict=True
        ):
            series.append(figure)
    return growth


def _draw(found: dict[str, Growth]) -> Figure:
    plot, axes = report.figure(columns=3)
    for axis, size in zip(axes, ("parameters", "rows", "batch"), strict=True):
        for label, growth in found.items():
            if label.endswith(f": {size}"):
                power = fit_power(growth.sizes, growth.seconds)
                name = f"{label.rpartition(':')[0]}: p = {power:.2f}"
                axis.plot(growth.sizes, [1e3 * s for s in growth.seconds], "o-", label=name)
        axis.set(xscale="log", yscale="log", xlabel=size, ylabel="ms")
        if axis.lines:
            axis.legend(fontsize=7)
    return plot
