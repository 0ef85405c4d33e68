"""Time and memory of value and gradient: our rule against unrolling, matfree and lineax.

The paper's first experiment: a square convolution matrix that grows while its kernel stays, and
LSMR differentiated by a rule, or through Equinox's while loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from matplotlib.figure import Figure

from benchmarks import contestants, convolution
from benchmarks.contestants import (
    EVERYONE,
    OURS,
    PEERS,
    UNROLLED,
    Contestant,
    value_and_gradient,
)
from benchmarks.measure import best_times, compile_for, temporary_bytes
from benchmarks.report import Goal, Report, Table, figure

DISAGREEMENT = 0.05


def run(*, quick: bool) -> Report:
    """Times value and gradient for growing n, after checking that all gradients agree."""
    sizes = [2**6] if quick else [2**8, 2**12, 2**16, 2**20]
    limit = 100 if quick else 1000
    errors, times, memories = [], [], []
    for size in sizes:
        problem = convolution.problem(size)
        functions = {
            name: compile_for(value_and_gradient(solve, limit), problem)
            for name, solve in EVERYONE.items()
        }
        results = {name: function(problem) for name, function in functions.items()}
        exact = convolution.exact_gradients(problem)
        errors.append([size, *(_error(gradients, exact) for _, gradients in results.values())])
        iterations = int(results["constrainx"][0][1])
        rounds = 3 if quick or size > 2**16 else 10
        seconds = best_times(functions, problem, rounds=rounds)
        times.append([size, iterations, *(1e3 * time for time in seconds.values())])
        memories.append([size, *(temporary_bytes(f) / 1e6 for f in functions.values())])

    # Unrolled loops take seconds to compile.
    by_limit = (
        _memory_by_limit(2**6, (10, 100), OURS)
        if quick
        else _memory_by_limit(2**16, (10, 100, 1000), {**OURS, **UNROLLED})
    )
    return Report(
        name="adjoint",
        setting=(
            f"A is a square convolution with {convolution.TAPS} taps, float32. Kernel and b are "
            "standard normal, but for the middle tap: it is set so that the others sum to "
            f"{convolution.DOMINANCE} of it, which keeps the condition number below about 30 for "
            "every n. Value and gradient by kernel and b of ½‖x − target‖². "
            f"At most {limit} iterations. {contestants.DESCRIPTION}"
        ),
        tables=[
            Table(
                "Relative error of the gradient, against float64",
                {"n": "d"} | dict.fromkeys(EVERYONE, ".1e"),
                errors,
            ),
            Table(
                "Milliseconds, best of 3 or more",
                {"n": "d", "iterations": "d"} | dict.fromkeys(EVERYONE, ".2f"),
                times,
            ),
            Table(
                "How many times as long as ours they take",
                {"n": "d", "ours": ""} | dict.fromkeys(PEERS, ".1f"),
                [
                    [row[0], ours, *(_ratio(row, peer, ours) for peer in PEERS)]
                    for row in times
                    for ours in OURS
                ],
            ),
            Table(
                "Temporary memory in MB",
                {"n": "d"} | dict.fromkeys(EVERYONE, ".2f"),
                memories,
            ),
            by_limit,
        ],
        goals=[] if quick else [_speed_goal(times[-1]), _memory_goal(by_limit)],
        plots={"adjoint": _plot(times, memories)},
    )


def _error(gradients: Sequence[jax.Array], exact: Sequence[np.ndarray]) -> float:
    """The larger of the relative errors of both gradients; raises if it is not a gradient."""
    error = max(
        float(np.linalg.norm(np.asarray(gradient, np.float64) - truth) / np.linalg.norm(truth))
        for gradient, truth in zip(gradients, exact, strict=True)
    )
    if not error < DISAGREEMENT:
        raise RuntimeError(f"a gradient is off by {error:.1e}, so its time means nothing")
    return error


def _memory_by_limit(
    size: int, limits: Sequence[int], contested: Mapping[str, Contestant]
) -> Table:
    problem = convolution.problem(size)
    return Table(
        f"Temporary memory in MB against the limit on the iterations, n = {size}",
        {"limit": "d"} | dict.fromkeys(contested, ".2f"),
        [
            [limit]
            + [
                temporary_bytes(compile_for(value_and_gradient(solve, limit), problem)) / 1e6
                for solve in contested.values()
            ]
            for limit in limits
        ],
    )


def _ratio(row: list, peer: str, ours: str) -> float:
    time = dict(zip(EVERYONE, row[2:], strict=True))
    return time[peer] / time[ours]


def _speed_goal(row: list) -> Goal:
    ratio, cautious = (min(_ratio(row, peer, ours) for peer in UNROLLED) for ours in reversed(OURS))
    return Goal(
        f"value and gradient at n = {row[0]} at least 10 times as fast as the faster of the two "
        "unrolled loops, with full_rank=True",
        f"{ratio:.1f} times, and {cautious:.1f} times without full_rank",
        ratio >= 10,
    )


def _memory_goal(by_limit: Table) -> Goal:
    ours = [row[1] for row in by_limit.rows]
    growth = max(ours) / min(ours)
    return Goal(
        "memory does not grow with the iterations",
        f"a factor of {growth:.2f} from {by_limit.rows[0][0]} to {by_limit.rows[-1][0]} iterations",
        growth <= 1.01,
    )


def _plot(times: list[list], memories: list[list]) -> Figure:
    plot, (left, right) = figure(columns=2)
    for axes, rows, label in (
        (left, times, "milliseconds"),
        (right, memories, "temporary memory [MB]"),
    ):
        for i, name in enumerate(EVERYONE, start=-len(EVERYONE)):
            style = "o--" if name in UNROLLED else "o-"
            sizes, values = [row[0] for row in rows], [row[i] for row in rows]
            axes.plot(sizes, values, style, markersize=4, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel="n", ylabel=label)
    left.legend(fontsize=8)
    plot.suptitle("Value and gradient of a least-squares solution")
    return plot
