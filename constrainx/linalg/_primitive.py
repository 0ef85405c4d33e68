"""Least squares as one JAX primitive, so that JAX differentiates it by our rule in every mode.

A primitive rather than `jax.custom_vjp`, which forbids forward mode, or `jax.custom_jvp`, which
cannot say that a loop is linear in its right-hand side. A batched solve is the same primitive with
its axes noted down: it stays differentiable, and each lane stops on its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import batching, mlir
from jaxtyping import Array

from constrainx.errors import ArgumentTypeError
from constrainx.linalg import _vector
from constrainx.linalg._info import Info, Reason
from constrainx.linalg._problem import LeastSquares
from constrainx.linalg._spec import Spec
from constrainx.linalg._validate import describe, fits
from constrainx.linalg._vector import Vector

Axes: TypeAlias = tuple[int | None, ...]

lstsq_p = jax.extend.core.Primitive("constrainx_lstsq")
lstsq_p.multiple_results = True


def solve(
    spec: Spec,
    constants: Sequence[Array],
    b: Vector,
    damp: Array | None = None,
    reference: Array | None = None,
) -> tuple[Vector, Info]:
    """The least-squares solution as a differentiable operation."""
    scalars = [] if spec.damping == "none" else [damp]
    scalars += [reference] if spec.has_reference else []
    leaves = bind(*constants, *jax.tree.leaves(b), *scalars, spec=spec)
    return unflatten(spec, leaves)


def bind(*operands: Any, spec: Spec, batch: tuple[Axes, ...] = ()) -> list[Array]:
    """Binds the primitive.

    The jaxpr of A is a parameter of its own for JAX to see: a `jax.shard_map` in it decides on
    which devices everything around it runs.
    """
    return lstsq_p.bind(*operands, spec=spec, batch=batch, jaxpr=spec.jaxpr)


def unflatten(spec: Spec, leaves: Sequence[Array]) -> tuple[Vector, Info]:
    cut = len(leaves) - len(Info._fields)
    return jax.tree.unflatten(jax.tree.structure(spec.columns), leaves[:cut]), Info(*leaves[cut:])


def _run_unbatched(*operands: Array, spec: Spec) -> list[Array]:
    constants, b_leaves, scalars = spec.split(operands)
    b = jax.tree.unflatten(jax.tree.structure(spec.rows), b_leaves)
    dtype = _vector.scalar_dtype(spec.rows, spec.columns)
    damp = jnp.zeros((), dtype) if spec.damping == "none" else scalars[0]
    b_norm = scalars[-1] if spec.has_reference else _vector.safe_norm(b)
    problem = LeastSquares(spec.operator(constants), b, damp, b_norm)
    x, info = _solve_empty(problem) if 0 in problem.operator.shape else spec.solver.solve(problem)
    return [*_check_solution(spec, x), *_check_info(spec, info)]


def _solve_empty(problem: LeastSquares) -> tuple[Vector, Info]:
    """Zero, for an A without rows or columns, so that no solver has to handle that case."""
    finite = jnp.isfinite(problem.b_norm) & jnp.isfinite(problem.damp)
    return _vector.zeros_like(problem.operator.columns), Info(
        converged=finite,
        reason=jnp.where(finite, Reason.TRIVIAL, Reason.NOT_FINITE),
        iterations=jnp.zeros((), jnp.int32),
        residual_norm=_vector.safe_norm(problem.b),
        normal_residual_norm=jnp.zeros(()),
        condition=jnp.ones(()),
    )


def _run(
    *operands: Array, spec: Spec, batch: tuple[Axes, ...], jaxpr: jax.extend.core.ClosedJaxpr
) -> list[Array]:
    del jaxpr
    run = functools.partial(_run_unbatched, spec=spec)
    for axes in batch:
        run = jax.vmap(run, in_axes=axes)
    return run(*operands)


def _abstract_eval(*operands: Any, spec: Spec, batch: tuple[Axes, ...], **_: Any) -> list:
    shapes = [operand.shape for operand in operands]
    prefix: tuple[int, ...] = ()
    for axes in reversed(batch):
        sizes = {shape[axis] for shape, axis in zip(shapes, axes, strict=True) if axis is not None}
        prefix = (*prefix, sizes.pop())
        shapes = [
            shape if axis is None else shape[:axis] + shape[axis + 1 :]
            for shape, axis in zip(shapes, axes, strict=True)
        ]
    outputs = [*jax.tree.leaves(spec.columns), *_info_structure(spec)]
    return [jax.core.ShapedArray((*prefix, *leaf.shape), leaf.dtype) for leaf in outputs]


def _batch(
    operands: Sequence[Array],
    axes: Sequence[int | None],
    *,
    spec: Spec,
    batch: tuple[Axes, ...],
    **_: Any,
) -> tuple[list[Array], list[int]]:
    outputs = bind(*operands, spec=spec, batch=(*batch, tuple(axes)))
    return outputs, [0] * len(outputs)


def _info_structure(spec: Spec) -> list[jax.ShapeDtypeStruct]:
    dtype = _vector.scalar_dtype(spec.rows, spec.columns)
    scalar = jax.ShapeDtypeStruct((), dtype)
    integer = jax.ShapeDtypeStruct((), jnp.int32)
    return [jax.ShapeDtypeStruct((), jnp.bool_), integer, integer, scalar, scalar, scalar]


def _check_solution(spec: Spec, x: Vector) -> list[Array]:
    name = f"`{type(spec.solver).__name__}.solve`"
    if not fits(x, spec.columns):
        raise ArgumentTypeError(
            f"{name} must return a solution shaped like `problem.operator.columns`: wanted "
            f"{describe(spec.columns)}, got {describe(jax.tree.map(jnp.asarray, x))}."
        )
    return jax.tree.leaves(_vector.cast(x, spec.columns))


def _check_info(spec: Spec, info: Info) -> list[Array]:
    name = f"`{type(spec.solver).__name__}.solve`"
    if not isinstance(info, Info):
        raise ArgumentTypeError(
            f"{name} must return `(x, info)` with info a `constrainx.Info`, got "
            f"{type(info).__name__} in its place."
        )
    for field, value in zip(Info._fields, info, strict=True):
        if jnp.shape(value) != ():
            raise ArgumentTypeError(
                f"{name}: `info.{field}` must be a scalar, got shape {jnp.shape(value)}."
            )
    return [
        jnp.asarray(value, wanted.dtype)
        for value, wanted in zip(info, _info_structure(spec), strict=True)
    ]


_run_once_traced = jax.jit(_run, static_argnames=("spec", "batch", "jaxpr"))
lstsq_p.def_impl(_run_once_traced)
lstsq_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[lstsq_p] = _batch
mlir.register_lowering(lstsq_p, mlir.lower_fun(_run_once_traced, multiple_results=True))
