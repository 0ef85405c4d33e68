"""What an iteration of LSMR costs beyond its product with A and its product with Aᵀ."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

import constrainx as cx
from benchmarks.measure import best_times, compile_for
from benchmarks.report import Goal, Table

FEW, MANY = 5, 25
SETTING = (
    f"Overhead: the time of an iteration, as the difference of {MANY} and {FEW} iterations without "
    "a tolerance, against the same difference for a loop of one product with A and one with Aᵀ."
)


class Operator(NamedTuple):
    """A linear map ``apply(arrays, v)`` and a right-hand side for it."""

    name: str
    apply: Callable[[PyTree, PyTree], Array]
    arrays: PyTree
    like: PyTree
    b: Array


def measure(size: int, width: int, rounds: int) -> tuple[Table, Goal]:
    """Times a dense matrix of this size, and a network of this width."""
    rows = []
    for operator in (_matrix(size), _network(width)):
        functions = {
            (kind, count): compile_for(make(operator, count), operator.arrays, operator.b)
            for kind, make in (("loop", _products), ("LSMR", _lsmr))
            for count in (FEW, MANY)
        }
        best = best_times(functions, operator.arrays, operator.b, rounds=rounds)
        loop, lsmr = (
            1e3 * (best[kind, MANY] - best[kind, FEW]) / (MANY - FEW) for kind in ("loop", "LSMR")
        )
        rows.append([operator.name, loop, lsmr, lsmr / loop])
    worst = max(row[-1] for row in rows)
    table = Table(
        f"Milliseconds an iteration, best of {rounds}",
        {"A": "", "A and Aᵀ": ".3f", "LSMR": ".3f", "ratio": ".2f"},
        rows,
    )
    return table, Goal(
        "an iteration takes at most 1.3 times as long as its two products",
        f"at most {worst:.2f} times",
        worst <= 1.3,
    )


def _lsmr(operator: Operator, count: int) -> Callable[[PyTree, Array], tuple]:
    solver = cx.LSMR(rtol=0.0, condition_limit=float("inf"), max_iterations=count)

    def solve(arrays: PyTree, b: Array) -> tuple:
        return cx.lstsq(lambda v: operator.apply(arrays, v), b, like=operator.like, solver=solver)

    return solve


def _products(operator: Operator, count: int) -> Callable[[PyTree, Array], PyTree]:
    def loop(arrays: PyTree, b: Array) -> PyTree:
        # As `lstsq` does it: what does not depend on v is computed ahead of the loop.
        zero = jax.tree.map(jnp.zeros_like, operator.like)
        matvec = jax.linearize(lambda v: operator.apply(arrays, v), zero)[1]
        rmatvec = jax.linear_transpose(matvec, operator.like)
        return jax.lax.fori_loop(0, count, lambda _, v: rmatvec(matvec(v))[0], rmatvec(b)[0])

    return loop


def _matrix(size: int) -> Operator:
    # Scaled to a norm of about one, so that the loop of products neither grows nor fades.
    A = jax.random.normal(jax.random.key(0), (size, size)) / (2 * size**0.5)
    b = jax.random.normal(jax.random.key(1), (size,))
    return Operator(f"matrix, {size} × {size}", lambda A, v: A @ v, A, b, b)


def _network(width: int) -> Operator:
    """The Jacobian of a network with two hidden layers, by its parameters, for a batch."""
    sizes, batch = (784, width, width, 10), 128
    keys = jax.random.split(jax.random.key(2), len(sizes))
    parameters = [
        jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, shape in zip(keys, itertools.pairwise(sizes), strict=False)
    ]
    inputs = jax.random.normal(keys[-1], (batch, sizes[0]))

    def outputs(parameters: list[Array], inputs: Array) -> Array:
        *hidden, last = parameters
        for matrix in hidden:
            inputs = jnp.tanh(inputs @ matrix)
        return 1e-2 * inputs @ last

    def apply(arrays: tuple[list[Array], Array], v: list[Array]) -> Array:
        parameters, inputs = arrays
        return jax.jvp(lambda p: outputs(p, inputs), (parameters,), (v,))[1]

    count = sum(matrix.size for matrix in parameters)
    name = f"network Jacobian, {batch * sizes[-1]} × {count:,}"
    b = jax.random.normal(jax.random.key(3), (batch, sizes[-1]))
    return Operator(name, apply, (parameters, inputs), parameters, b)
