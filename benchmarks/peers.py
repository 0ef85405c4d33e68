"""The null-space step against the same step with other solvers, and against other methods."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure

from benchmarks import report
from benchmarks.measure import clock, compile_for, count_bytes
from benchmarks.peer_methods import MOST_ITERATIONS, RTOL, Contestant, Step, all_contestants
from benchmarks.peer_problems import GAMMA, Problem, all_problems
from benchmarks.report import Goal, Report, Table

# A method that takes longer than this for a step is measured once.
SLOW = 10.0
COLUMNS = {
    "method": "", "ms": ".2f", "/ ours": ".2f", "MB": ".0f", "iterations": "d", "residual": ".0e",
    "violation": ".0e", "steps": "d",
}  # fmt: skip


class Measured(NamedTuple):
    """One method on one problem.

    Attributes:
        seconds: of a training step, the best of several.
        bytes: arguments, results and temporary arrays, as XLA has planned them.
        iterations: of the solver in the first step.
        residual: ‖J u + γ c‖ after the solve, relative to before.
        violation: the root mean square of c after a fixed time.
        steps: how many that were, at least one.
        is_exact: whether it solves the linear system.
    """

    seconds: float
    bytes: int
    iterations: int
    residual: float
    violation: float
    steps: int
    is_exact: bool


def run(*, quick: bool) -> Report:
    """Measures every method on every problem."""
    seconds, rounds = (0.05, 1) if quick else (1.0, 3)
    results: dict[str, dict[str, Measured]] = {}
    for problem in all_problems(quick=quick):
        results[problem.name] = _measure(problem, seconds, rounds)
        jax.clear_caches()
        gc.collect()
    return Report(
        name="peers",
        setting=(
            f"float32, gradient descent, γ = {GAMMA}. A step is the gradient of the loss, the rows "
            "linearised once, the solve, and the update; in (a) and (d) the loss is a quadratic "
            f"one, so that little else is timed. All solvers stop at {RTOL:g}, after at most "
            f"{MOST_ITERATIONS} iterations; 'constrainx, default' stops where solver=\"auto\" "
            "does, which may be earlier. 'dense pinv' takes part where the Jacobian has at most "
            "half a gigabyte. Best of "
            f"{rounds} steps in turns, or one if it takes {SLOW:g} s. 'violation' is the root "
            f"mean square of the rows after {seconds:g} s of training. Penalty and Lagrangian: "
            "the weight of two with the least violation. 'MB' are arguments, results and "
            "temporary arrays of the compiled step."
        ),
        tables=[_tabulate(name, found) for name, found in results.items()],
        goals=_judge(results),
        plots={"peers": _draw(results)},
    )


def _measure(problem: Problem, seconds: float, rounds: int) -> dict[str, Measured]:
    flat, unravel = ravel_pytree(problem.parameters)
    contestants = all_contestants(problem)
    residual = jax.jit(lambda p, u: _residual(problem, p, u))
    violation = jax.jit(lambda p: jnp.sqrt(jnp.mean(problem.rows(p) ** 2)))
    steps, starts, found = {}, {}, {}
    for name, contestant in contestants.items():
        start = (flat if contestant.is_flat else problem.parameters, contestant.memory)
        step = compile_for(contestant.step, *start)
        taken, first = _time(step, start)
        update = unravel(taken.update) if contestant.is_flat else taken.update
        left, iterations = float(residual(problem.parameters, update)), int(taken.iterations)
        parameters, count = taken.parameters, 1
        del taken, update
        if first < seconds:
            parameters, count = _train(step, start, seconds)
        found[name] = Measured(
            seconds=first,
            bytes=count_bytes(step),
            iterations=iterations,
            residual=left,
            violation=float(violation(unravel(parameters) if contestant.is_flat else parameters)),
            steps=count,
            is_exact=contestant.is_exact,
        )
        steps[name], starts[name] = step, start
    for name, step in rounds * list(steps.items()):
        if found[name].seconds < SLOW:
            _time(step, starts[name])  # while the memory of the one before is still being freed
            best = min(found[name].seconds, _time(step, starts[name])[1])
            found[name] = found[name]._replace(seconds=best)
    return _keep_best_weights(found, contestants)


def _time(step: Any, start: tuple[Any, Any]) -> tuple[Step, float]:
    begin = clock()
    taken = jax.block_until_ready(step(*start))
    return taken, clock() - begin


def _train(step: Any, start: tuple[Any, Any], seconds: float) -> tuple[Any, int]:
    """Parameters after a time, and how many steps that were."""
    parameters, memory = start
    count, begin = 0, clock()
    while clock() - begin < seconds:
        taken: Step = step(parameters, memory)
        parameters, memory = jax.block_until_ready((taken.parameters, taken.memory))
        count += 1
    return parameters, count


def _residual(problem: Problem, parameters: Any, update: Any) -> jax.Array:
    values, linear = jax.linearize(problem.rows, parameters)
    before = jax.tree.map(lambda g: -problem.rate * g, jax.grad(problem.loss)(parameters))
    asked = linear(before) + GAMMA * values
    return jnp.linalg.norm(linear(update) + GAMMA * values) / jnp.linalg.norm(asked)


def _keep_best_weights(
    found: dict[str, Measured], contestants: Mapping[str, Contestant]
) -> dict[str, Measured]:
    kept = {}
    for name in contestants:
        kind = name.split()[0]
        if kind not in ("penalty", "Lagrangian"):
            kept[name] = found[name]
            continue
        rivals = [other for other in contestants if other.startswith(kind)]
        finite = [other for other in rivals if found[other].violation < float("inf")]
        if name == min(finite or rivals, key=lambda other: found[other].violation):
            kept[name] = found[name]
    return kept


def _find_ours(found: Mapping[str, Measured]) -> float:
    """The faster of our exact steps."""
    return min(m.seconds for name, m in found.items() if name.startswith("cons") and m.is_exact)


def _tabulate(name: str, found: Mapping[str, Measured]) -> Table:
    ours = _find_ours(found)
    rows = [
        (
            method, 1e3 * m.seconds, m.seconds / ours, m.bytes / 1e6, m.iterations, m.residual,
            m.violation, m.steps,
        )
        for method, m in found.items()
    ]  # fmt: skip
    return Table(name, COLUMNS, rows)


def _judge(results: Mapping[str, Mapping[str, Measured]]) -> list[Goal]:
    goals = []
    for name, found in results.items():
        ours = _find_ours(found)
        rivals = {
            method: m.seconds
            for method, m in found.items()
            if m.is_exact and not method.startswith("constrainx")
        }
        fastest = min(rivals, key=lambda method: rivals[method])
        ratio = rivals[fastest] / ours
        goals.append(
            Goal(
                f"{name}: the fastest of all exact methods",
                f"{fastest} takes {ratio:.2f} times as long",
                ratio >= 1,
            )
        )
        if name[:3] in ("(a)", "(c)"):
            speed = rivals["matfree, LSMR"] / ours
            goals.append(
                Goal(f"{name}: 5 times as fast as matfree", f"{speed:.1f} times", speed >= 5)
            )
    return goals


def _draw(results: Mapping[str, Mapping[str, Measured]]) -> Figure:
    plot, (left, right) = report.figure(columns=2)
    methods = {
        "constrainx, Gram": "o", "constrainx, LSMR": "s", "constrainx, default": "D",
        "matfree, LSMR": "^", "lineax, LSMR": "v", "dense pinv": "P", "penalty": "x",
        "Lagrangian": "+",
    }  # fmt: skip
    for method, marker in methods.items():
        points = [
            (place, m)
            for place, found in enumerate(results.values())
            for name, m in found.items()
            if name.startswith(method)
        ]
        color = "#0072B2" if method.startswith("cons") else None
        for axis, pick in ((left, lambda m: 1e3 * m.seconds), (right, lambda m: m.violation)):
            axis.plot(
                [place for place, _ in points],
                [pick(m) for _, m in points],
                marker, label=method, color=color, alpha=0.8,
            )  # fmt: skip
    for axis, label in ((left, "ms a step"), (right, "violation after equal time")):
        axis.set(yscale="log", ylabel=label)
        labels = [name.replace(" parameters", "").replace("MLP of ", "") for name in results]
        axis.set_xticks(range(len(results)), labels, rotation=60, ha="right", fontsize=7)
    left.legend(fontsize=7)
    return plot
