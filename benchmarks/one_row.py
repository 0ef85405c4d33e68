"""One row on a large pytree, which is what a scalar constraint on a network asks for."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import lineax as lx
import matfree.lstsq
import numpy as np
from jaxtyping import Array, PyTree

import constrainx as cx
from benchmarks.measure import best_times, compile_for, temporary_bytes
from benchmarks.report import Goal, Table

LEAVES = 10
RTOL = 1e-6
SETTING = (
    f"One row: A is v ↦ ⟨g, v⟩ for a standard normal g, b = 1, the tolerance {RTOL:g}. matfree "
    "takes the same numbers as one flat vector, raveled before the clock starts."
)


def measure(shape: tuple[int, int], rounds: int) -> tuple[Table, Goal]:
    """Times the solvers on `LEAVES` leaves of this shape."""
    keys = jax.random.split(jax.random.key(0), LEAVES)
    tree = {f"layer {i}": jax.random.normal(key, shape) for i, key in enumerate(keys)}
    flat, b = jnp.concatenate([leaf.ravel() for leaf in tree.values()]), jnp.ones(1)
    functions = {
        name: compile_for(solve, flat if name == "matfree" else tree, b)
        for name, solve in CONTESTANTS.items()
    }
    calls = {
        name: lambda f=f, g=flat if name == "matfree" else tree: f(g, b)
        for name, f in functions.items()
    }
    factor = 1 / float(np.sum(np.square(np.asarray(flat, np.float64))))
    errors = {name: _error(call(), flat, factor) for name, call in calls.items()}
    seconds = best_times(calls, rounds=rounds)
    ratio = seconds["matfree"] / seconds["constrainx"]
    table = Table(
        f"One row, {flat.size:,} unknowns in {LEAVES} leaves, best of {rounds}",
        {"solver": "", "ms": ".1f", "/ constrainx": ".2f", "memory [MB]": ".0f", "error": ".0e"},
        [
            [
                name,
                1e3 * seconds[name],
                seconds[name] / seconds["constrainx"],
                temporary_bytes(function) / 1e6,
                errors[name],
            ]
            for name, function in functions.items()
        ],
    )
    return table, Goal(
        f"at least 3 times as fast as matfree on {flat.size:,} unknowns",
        f"{ratio:.1f} times",
        ratio >= 3,
    )


def _constrainx(solver: cx.Solver) -> Callable[[PyTree, Array], PyTree]:
    def solve(g: PyTree, b: Array) -> PyTree:
        return cx.lstsq(lambda v: _inner(g, v)[None], b, like=g, solver=solver)[0]

    return solve


def _matfree(g: Array, b: Array) -> Array:
    return matfree.lstsq.lsmr(atol=RTOL, btol=RTOL)(lambda u: u[0] * g, b)[0]


def _lineax(g: PyTree, b: Array) -> PyTree:
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), g)
    operator = lx.FunctionLinearOperator(lambda v: _inner(g, v)[None], like)
    return lx.linear_solve(operator, b, lx.LSMR(rtol=RTOL, atol=0.0), throw=False).value


CONTESTANTS: dict[str, Callable] = {
    "constrainx": _constrainx(cx.LSMR(rtol=RTOL)),
    "constrainx, Cholesky": _constrainx(cx.Cholesky()),
    "matfree": _matfree,
    "lineax": _lineax,
}


def _inner(left: PyTree, right: PyTree) -> Array:
    return jax.tree.reduce(jnp.add, jax.tree.map(lambda a, b: jnp.sum(a * b), left, right))


def _error(x: PyTree, flat: Array, factor: float) -> float:
    """The relative error against the solution, factor · g."""
    got = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(x)])
    return float(jnp.linalg.norm(got - factor * flat) / jnp.linalg.norm(factor * flat))
