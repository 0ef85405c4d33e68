"""One training step by each method: ours, the same step with other solvers, and other methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import lineax as lx
import matfree.lstsq
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PyTree

import constrainx as cx
from benchmarks.peer_problems import GAMMA, Problem

RTOL = 1e-5
# Rows times parameters up to which a dense Jacobian is tried: half a gigabyte.
DENSE = 2**27
MOST_ITERATIONS = 200


class Step(NamedTuple):
    """What a step returns.

    Attributes:
        parameters: after it.
        memory: what the method remembers.
        update: what was added to the parameters.
        iterations: of the solver.
    """

    parameters: PyTree
    memory: PyTree
    update: PyTree
    iterations: Int[Array, ""]


class Contestant(NamedTuple):
    """A training step, and with what it starts.

    Attributes:
        step: (parameters, memory) ↦ `Step`.
        memory: at the start.
        is_exact: whether it solves the linear system, to the common tolerance.
        is_flat: whether it takes the parameters as one vector.
    """

    step: Callable[[PyTree, PyTree], Step]
    memory: PyTree = ()
    is_exact: bool = True
    is_flat: bool = False


Solve: TypeAlias = Callable[[Callable, Float[Array, " rows"], PyTree], tuple[PyTree, Any]]


def all_contestants(problem: Problem) -> dict[str, Contestant]:
    """Everyone who can take part."""
    count = jax.eval_shape(problem.rows, problem.parameters).size
    size = sum(leaf.size for leaf in jax.tree.leaves(problem.parameters))
    found = {"no constraint": Contestant(functools.partial(_plain, problem), is_exact=False)}
    if problem.stores_rows:
        found["constrainx, Gram"] = _ours(problem, "gram")
    if count > 1:
        found["constrainx, LSMR"] = _ours(
            problem, cx.LSMR(rtol=RTOL, max_iterations=MOST_ITERATIONS)
        )
        inexact = _ours(problem, "auto")
        found["constrainx, default"] = inexact._replace(is_exact=False)
    found["matfree, LSMR"] = _theirs(problem, _matfree, is_flat=True)
    found["lineax, LSMR"] = _theirs(problem, _lineax)
    if count * size <= DENSE:
        found["dense pinv"] = _theirs(problem, _pinv, is_flat=True)
    for weight in problem.weights:
        found[f"penalty {weight:g}"] = _penalty(problem, weight)
        found[f"Lagrangian {weight:g}"] = _lagrangian(problem, weight, count)
    return found


def _descend(problem: Problem, parameters: PyTree) -> PyTree:
    return jax.tree.map(lambda g: -problem.rate * g, jax.grad(problem.loss)(parameters))


def _add(parameters: PyTree, update: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, parameters, update)


def _plain(problem: Problem, parameters: PyTree, memory: PyTree) -> Step:
    update = _descend(problem, parameters)
    return Step(_add(parameters, update), memory, update, jnp.zeros((), jnp.int32))


def _ours(problem: Problem, solver: Any) -> Contestant:
    (name,) = problem.constraints.names

    def step(parameters: PyTree, memory: PyTree) -> Step:
        found = cx.project(
            _descend(problem, parameters),
            problem.constraints,
            parameters,
            batch=problem.batch,
            key=jax.random.key(0),
            solver=solver,
        )
        iterations = found.reports[name].iterations
        return Step(_add(parameters, found.update), memory, found.update, iterations)

    return Contestant(step)


def _theirs(problem: Problem, solve: Solve, *, is_flat: bool = False) -> Contestant:
    """The same step with another solver: linearised once, as one vector if it must be."""
    _, unravel = ravel_pytree(problem.parameters) if is_flat else (None, lambda p: p)

    def step(parameters: PyTree, memory: PyTree) -> Step:
        def loss(parameters: PyTree) -> Array:
            return problem.loss(unravel(parameters))

        values, linear = jax.linearize(lambda p: problem.rows(unravel(p)), parameters)
        update = jax.tree.map(lambda g: -problem.rate * g, jax.grad(loss)(parameters))
        change, iterations = solve(linear, linear(update) + GAMMA * values, parameters)
        update = jax.tree.map(jnp.subtract, update, change)
        return Step(_add(parameters, update), memory, update, jnp.asarray(iterations, jnp.int32))

    return Contestant(step, is_flat=is_flat)


def _matfree(linear: Callable, b: Array, like: PyTree) -> tuple[PyTree, Any]:
    transpose = jax.linear_transpose(linear, like)
    solve = matfree.lstsq.lsmr(atol=RTOL, btol=RTOL, maxiter=MOST_ITERATIONS)
    x, stats = solve(lambda u: transpose(u)[0], b)
    return x, stats["iteration_count"]


def _lineax(linear: Callable, b: Array, like: PyTree) -> tuple[PyTree, Any]:
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like)
    operator = lx.FunctionLinearOperator(linear, shapes)
    solver = lx.LSMR(rtol=RTOL, atol=0.0, max_steps=MOST_ITERATIONS)
    found = lx.linear_solve(operator, b, solver, throw=False)
    return found.value, found.stats["num_steps"]


def _pinv(linear: Callable, b: Array, like: PyTree) -> tuple[PyTree, Any]:
    transpose = jax.linear_transpose(linear, like)
    (dense,) = jax.vmap(transpose)(jnp.eye(b.size, dtype=b.dtype))
    # By default it would cut off a part of the singular values that grows with the parameters.
    return jnp.linalg.pinv(dense, rtol=1e-6) @ b, 1


def _penalty(problem: Problem, weight: float) -> Contestant:
    def step(parameters: PyTree, memory: PyTree) -> Step:
        def total(parameters: PyTree) -> Array:
            return problem.loss(parameters) + weight / 2 * jnp.mean(problem.rows(parameters) ** 2)

        update = jax.tree.map(lambda g: -problem.rate * g, jax.grad(total)(parameters))
        return Step(_add(parameters, update), memory, update, jnp.zeros((), jnp.int32))

    return Contestant(step, is_exact=False)


def _lagrangian(problem: Problem, weight: float, count: int) -> Contestant:
    def step(parameters: PyTree, multipliers: Array) -> Step:
        def total(parameters: PyTree) -> tuple[Array, Array]:
            rows = problem.rows(parameters)
            added = jnp.mean(multipliers * rows) + weight / 2 * jnp.mean(rows**2)
            return problem.loss(parameters) + added, rows

        gradient, rows = jax.grad(total, has_aux=True)(parameters)
        update = jax.tree.map(lambda g: -problem.rate * g, gradient)
        # The same learning rate for the multipliers, or they outrun the parameters.
        multipliers = multipliers + problem.rate * weight * rows
        return Step(_add(parameters, update), multipliers, update, jnp.zeros((), jnp.int32))

    return Contestant(step, jnp.zeros(count), is_exact=False)
