"""Accuracy against iterations, and against the condition number, in float32.

The paper's second comparison: a tall random matrix with a condition number near the end of what
float32 can hold, solved by LSMR and by CG on the normal equations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from matplotlib.figure import Figure

import constrainx as cx
from benchmarks.report import Report, Table, figure

COLUMNS = 50
CONDITION = 1e7


class Problem(NamedTuple):
    """A x = b in float32, with the x that b was made from."""

    A: jax.Array
    b: jax.Array
    x: np.ndarray


class Accuracy(NamedTuple):
    """‖x − x*‖ / ‖x*‖ and ‖b − A x‖ / ‖b‖, both computed in float64."""

    error: float
    residual: float


def run(*, quick: bool) -> Report:
    """Runs all solvers on the paper's problem, and on a row of better conditioned ones."""
    rows, sweep_rows = (500, 500) if quick else (100_000, 10_000)
    limits = [1, 50] if quick else [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    problem = _problem(rows, CONDITION)
    direct = {name: _accuracy(problem, name) for name in DIRECT}
    iterative = {name: [_accuracy(problem, name, limit) for limit in limits] for name in ITERATIVE}

    conditions = [10.0**k for k in ((1, 7) if quick else range(1, 8))]
    sweep_limits = [50] if quick else [100, 500, 2000]
    by_condition = _by_condition(sweep_rows, conditions, sweep_limits)
    return Report(
        name="conditioning",
        setting=(
            f"A is random, {rows} × {COLUMNS}, float32, with singular values log-spaced from "
            f"{1 / CONDITION:.0e} to 1. b = A x* is computed in float64 for a standard normal x* "
            "and rounded to float32, so the system is consistent up to rounding, and the error in "
            "x is known. Tolerances are zero, but our LSMR, like SciPy's, still stops once the "
            "residual is at the precision of the arithmetic; lineax's goes on. 'CG' is "
            "constrainx.CG, the stable form known as CGLS, which never multiplies by AᵀA; 'CG on "
            "AᵀA' is jax.scipy.sparse.linalg.cg on the normal equations, which is what the paper "
            f"compares with. The paper's singular values go from 1 to {CONDITION:.0e} instead, "
            "which is the same but for the range of float32: see the last table."
        ),
        tables=[
            _by_iterations("Relative error of x", limits, iterative, direct, "error"),
            _by_iterations("Relative residual", limits, iterative, direct, "residual"),
            by_condition,
            _by_scale(sweep_rows, sweep_limits[-1]),
        ],
        plots={"conditioning": _plot(limits, iterative, direct, by_condition)},
    )


def _problem(rows: int, condition: float, scale: float = 1.0) -> Problem:
    random = np.random.default_rng(0)
    left = np.linalg.qr(random.normal(size=(rows, COLUMNS)))[0]
    right = np.linalg.qr(random.normal(size=(COLUMNS, COLUMNS)))[0]
    A = ((left * np.geomspace(scale / condition, scale, COLUMNS)) @ right.T).astype(np.float32)
    x = random.normal(size=COLUMNS)
    b = A.astype(np.float64) @ x
    return Problem(jnp.asarray(A), jnp.asarray(b, jnp.float32), x)


def _accuracy(problem: Problem, name: str, limit: int | None = None) -> Accuracy:
    x = np.asarray(_jit(name, limit)(problem.A, problem.b), np.float64)
    b = np.asarray(problem.b, np.float64)
    residual = b - np.asarray(problem.A, np.float64) @ x
    return Accuracy(
        float(np.linalg.norm(x - problem.x) / np.linalg.norm(problem.x)),
        float(np.linalg.norm(residual) / np.linalg.norm(b)),
    )


def _ours(solver: cx.Solver) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def solve(A: jax.Array, b: jax.Array) -> jax.Array:
        return cx.lstsq(lambda v: A @ v, b, like=A[0], solver=solver)[0]

    return solve


def _lineax(limit: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    solver = lx.LSMR(rtol=0.0, atol=0.0, conlim=float("inf"), max_steps=limit)

    def solve(A: jax.Array, b: jax.Array) -> jax.Array:
        like = jax.ShapeDtypeStruct((A.shape[1],), A.dtype)
        operator = lx.FunctionLinearOperator(lambda v: A @ v, like)
        return lx.linear_solve(operator, b, solver, throw=False).value

    return solve


def _textbook(limit: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def solve(A: jax.Array, b: jax.Array) -> jax.Array:
        return jax.scipy.sparse.linalg.cg(
            lambda v: A.T @ (A @ v), A.T @ b, tol=0.0, atol=0.0, maxiter=limit
        )[0]

    return solve


ITERATIVE: dict[str, Callable[[int], Callable]] = {
    "LSMR": lambda limit: _ours(
        cx.LSMR(rtol=0.0, condition_limit=float("inf"), max_iterations=limit)
    ),
    "LSMR (lineax)": _lineax,
    "CG": lambda limit: _ours(cx.CG(rtol=0.0, max_iterations=limit)),
    "CG on AᵀA": _textbook,
}
DIRECT: dict[str, Callable] = {"Cholesky": _ours(cx.Cholesky()), "QR": _ours(cx.QR())}


@functools.cache
def _jit(name: str, limit: int | None) -> Callable:
    return jax.jit(DIRECT[name] if limit is None else ITERATIVE[name](limit))


def _by_iterations(
    title: str,
    limits: Sequence[int],
    iterative: dict[str, list[Accuracy]],
    direct: dict[str, Accuracy],
    field: str,
) -> Table:
    columns = [[getattr(at, field) for at in path] for path in iterative.values()]
    lines = [getattr(at, field) for at in direct.values()]
    return Table(
        title,
        {"iterations": "d"} | dict.fromkeys([*iterative, *direct], ".1e"),
        [[limit, *values, *lines] for limit, *values in zip(limits, *columns, strict=True)],
    )


def _by_condition(rows: int, conditions: Sequence[float], limits: Sequence[int]) -> Table:
    cells = []
    for condition in conditions:
        problem = _problem(rows, condition)
        # `fmin` passes over the NaN of a solver that has broken down.
        best = [
            float(np.fmin.reduce([_accuracy(problem, name, limit).error for limit in limits]))
            for name in ITERATIVE
        ]
        cells.append([condition, *best, *_direct_errors(problem)])
    return Table(
        f"Relative error of x against the condition number, {rows} rows: the best that each solver "
        f"reaches in {limits[0]} to {limits[-1]} iterations",
        {"condition": ".0e"} | dict.fromkeys([*ITERATIVE, *DIRECT], ".1e"),
        cells,
    )


def _by_scale(rows: int, limit: int) -> Table:
    cells = []
    for scale in (1.0, CONDITION):
        problem = _problem(rows, CONDITION, scale)
        errors = [_accuracy(problem, name, limit).error for name in ITERATIVE]
        cells.append([scale, *errors, *_direct_errors(problem)])
    return Table(
        f"Relative error of x after {limit} iterations against the largest singular value, "
        f"{rows} rows, condition number {CONDITION:.0e}",
        {"largest": ".0e"} | dict.fromkeys([*ITERATIVE, *DIRECT], ".1e"),
        cells,
    )


def _direct_errors(problem: Problem) -> list[float]:
    return [_accuracy(problem, name).error for name in DIRECT]


def _plot(
    limits: Sequence[int],
    iterative: dict[str, list[Accuracy]],
    direct: dict[str, Accuracy],
    by_condition: Table,
) -> Figure:
    plot, axes = figure(columns=3)
    names = {"error": "‖x − x*‖ / ‖x*‖", "residual": "‖b − A x‖ / ‖b‖"}
    for ax, (field, name) in zip(axes, names.items(), strict=False):
        for solver, path in iterative.items():
            ax.loglog(limits, [getattr(at, field) for at in path], "o-", markersize=4, label=solver)
        for style, at in zip((":", "--"), direct.values(), strict=True):
            if np.isfinite(getattr(at, field)):
                ax.axhline(getattr(at, field), color="black", linestyle=style)
        ax.set(xlabel="iterations", ylabel=name, title=f"condition number {CONDITION:.0e}")
    conditions, *errors = zip(*by_condition.rows, strict=True)
    for values in errors[: len(iterative)]:
        axes[-1].loglog(conditions, values, "o-", markersize=4)
    for style, solver, values in zip((":", "--"), direct, errors[len(iterative) :], strict=True):
        axes[-1].loglog(conditions, values, style, color="black")
        axes[0].plot([], [], style, color="black", label=solver)
    axes[-1].set(xlabel="condition number", ylabel=names["error"], title="best of all iterations")
    axes[0].legend(fontsize=8)
    plot.suptitle("Least squares in float32")
    return plot
