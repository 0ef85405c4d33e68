"""Six ways to solve the convolution problem by LSMR and to differentiate the solution."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import equinox.internal as eqxi
import jax
import lineax as lx
import matfree.lstsq
from jaxtyping import Array, Float, Int

import constrainx as cx
from benchmarks import convolution
from benchmarks.convolution import Problem

Solution: TypeAlias = tuple[Float[Array, " n"], Int[Array, ""]]
Contestant: TypeAlias = Callable[[Float[Array, " taps"], Float[Array, " n"], int], Solution]

RTOL = 1e-5


def value_and_gradient(solve: Contestant, limit: int) -> Callable[[Problem], tuple]:
    """((loss, iterations), gradients by kernel and by b), with at most ``limit`` iterations."""

    def value(parameters: tuple[Array, Array], target: Array) -> tuple[Array, Array]:
        x, iterations = solve(*parameters, limit)
        return convolution.loss(x, target), iterations

    def function(problem: Problem) -> tuple:
        parameters = (problem.kernel, problem.b)
        return jax.value_and_grad(value, has_aux=True)(parameters, problem.target)

    return function


def _constrainx(kernel: Array, b: Array, limit: int, *, full_rank: bool) -> Solution:
    solver = cx.LSMR(rtol=RTOL, max_iterations=limit)
    x, info = cx.lstsq(convolution.matvec, b, kernel, like=b, solver=solver, full_rank=full_rank)
    return x, info.iterations


def _matfree(kernel: Array, b: Array, limit: int) -> Solution:
    solve = matfree.lstsq.lsmr(atol=RTOL, btol=RTOL, maxiter=limit)
    x, stats = solve(convolution.rmatvec, b, kernel)
    return x, stats["iteration_count"]


def _lineax(kernel: Array, b: Array, limit: int) -> Solution:
    operator = lx.FunctionLinearOperator(
        lambda v: convolution.matvec(v, kernel), jax.ShapeDtypeStruct(b.shape, b.dtype)
    )
    solver = lx.LSMR(rtol=RTOL, atol=0.0, max_steps=limit)
    solution = lx.linear_solve(operator, b, solver, throw=False)
    return solution.value, solution.stats["num_steps"]


def _unroll(kernel: Array, b: Array, limit: int, *, kind: str) -> Solution:
    loop = functools.partial(eqxi.while_loop, kind=kind, max_steps=limit)
    solve = matfree.lstsq.lsmr(
        atol=RTOL, btol=RTOL, maxiter=limit, while_loop=loop, custom_vjp=False
    )
    x, stats = solve(convolution.rmatvec, b, kernel)
    return x, stats["iteration_count"]


OURS: dict[str, Contestant] = {
    "constrainx": functools.partial(_constrainx, full_rank=False),
    "full rank": functools.partial(_constrainx, full_rank=True),
}
UNROLLED: dict[str, Contestant] = {
    "checkpointed": functools.partial(_unroll, kind="checkpointed"),
    "bounded": functools.partial(_unroll, kind="bounded"),
}
PEERS: dict[str, Contestant] = {"matfree": _matfree, "lineax": _lineax, **UNROLLED}
EVERYONE: dict[str, Contestant] = {**OURS, **PEERS}

DESCRIPTION = (
    f"All run LSMR to a tolerance of {RTOL:g}. 'full rank' is constrainx with full_rank=True, "
    "which holds here. 'checkpointed' and 'bounded' are LSMR (matfree's, without its custom rule) "
    "differentiated through Equinox's while loops of these names."
)
