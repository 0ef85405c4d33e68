"""The derivative of least squares, from which forward mode, reverse mode and all mixtures follow.

With r = b − A x the derivative of the minimum-norm solution is, at
constant rank and without damping (Golub and Pereyra, 1973),

    dx = A⁺(db − dA x) + (AᵀA)⁺ dAᵀ r + (I − A⁺A) dAᵀ y,    y = (Aᵀ)⁺ x,

which takes two solves that are linear in the tangents, and y, which is not a tangent at all:

    s = (Aᵀ)⁺ dAᵀ r,    v = dAᵀ y,    dx = v + A⁺(db − dA x + s − A v).

A solve is linear in its right-hand side and its transpose is a solve with Aᵀ. So reverse mode
costs those two solves and y, and stores nothing that grows with the iterations.

With damping λ and H = AᵀA + λ²I,

    dx = H⁻¹Aᵀ(db − dA x) + H⁻¹q,    q = dAᵀ r − 2λ x dλ.

H⁻¹q needs care: with s = (AAᵀ + λ²I)⁻¹A q it is (q − Aᵀs)/λ², all cancellation where λ is small.
See `_damped`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jaxtyping import Array

from constrainx.linalg import _vector
from constrainx.linalg._operator import LinearOperator
from constrainx.linalg._primitive import Axes, lstsq_p, solve, unflatten
from constrainx.linalg._spec import Spec
from constrainx.linalg._vector import Scalar, Vector


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Any], *, spec: Spec, batch: tuple[Axes, ...]
) -> tuple[list[Array], list]:
    moving = [i for i, tangent in enumerate(tangents) if not _is_zero(tangent)]

    def rule(primals: list[Array], moved: list[Array]) -> tuple[list[Array], list[Array]]:
        return _pushforward(spec, primals, dict(zip(moving, moved, strict=True)))

    for axes in batch:
        rule = jax.vmap(rule, in_axes=(list(axes), [axes[i] for i in moving]))
    outputs, dx = rule(list(primals), [tangents[i] for i in moving])
    info = outputs[len(dx) :]
    return outputs, [*dx, *(ad.Zero(jax.typeof(leaf).to_tangent_aval()) for leaf in info)]


def _transpose(
    cotangents: Sequence[Any], *operands: Any, spec: Spec, batch: tuple[Axes, ...]
) -> list:
    constants, b_leaves, scalars = spec.split(operands)
    g = [ad.instantiate_zeros(ct) for ct in cotangents[: len(jax.tree.leaves(spec.columns))]]

    def rule(constants: list[Array], scalars: list[Array], g: list[Array]) -> list[Array]:
        vector = jax.tree.unflatten(jax.tree.structure(spec.columns), g)
        p, _ = solve(spec.T, constants, vector, scalars[0] if scalars else None)
        return jax.tree.leaves(p)

    for axes in batch:
        constant_axes, b_axes, scalar_axes = spec.split(axes)
        rule = _batched_transpose(jax.vmap(rule, in_axes=(constant_axes, scalar_axes, 0)), b_axes)
    return [
        *([None] * len(constants)),
        *rule(constants, scalars, g),
        *([None] * len(scalars)),
    ]


def _batched_transpose(rule: Callable, axes: Sequence[int | None]) -> Callable:
    """Puts each result's batch axis where the operand has it, or sums over it if it has none."""

    def batched(*args: Any) -> list[Array]:
        return [
            jnp.sum(leaf, axis=0) if axis is None else jnp.moveaxis(leaf, 0, axis)
            for leaf, axis in zip(rule(*args), axes, strict=True)
        ]

    return batched


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero) or tangent.dtype == jax.dtypes.float0


def _pushforward(
    spec: Spec,
    primals: Sequence[Array],
    tangents: dict[int, Array],
) -> tuple[list[Array], list[Array]]:
    """The solution and its directional derivative; missing tangents are zero."""
    constants, b_leaves, scalars = spec.split(primals)
    b = jax.tree.unflatten(jax.tree.structure(spec.rows), b_leaves)
    damp = None if spec.damping == "none" else scalars[0]
    first_b = len(constants)
    first_scalar = first_b + len(b_leaves)
    d_constants = {i: t for i, t in tangents.items() if i < first_b}
    d_damp = None if damp is None else tangents.get(first_scalar)
    d_b = jax.tree.unflatten(
        jax.tree.structure(spec.rows),
        [
            tangents.get(first_b + i, jnp.zeros(leaf.shape, leaf.dtype))
            for i, leaf in enumerate(b_leaves)
        ],
    )

    leaves = lstsq_p.bind(*primals, spec=spec, batch=())
    x, _ = unflatten(spec, leaves)
    plain = spec.without_reference
    if not d_constants and d_damp is None:
        dx, _ = solve(plain, constants, d_b, damp)
        return leaves, jax.tree.leaves(dx)

    operator = spec.operator(constants)
    residual = _vector.subtract(b, operator.matvec(x))
    derivative = _derivative_of_operator(plain, constants, d_constants)
    rhs = _vector.subtract(d_b, derivative.matvec(x))
    if damp is None:
        dx = _undamped(plain, constants, x, residual, rhs, derivative)
    else:
        q = derivative.rmatvec(residual)
        if d_damp is not None:
            q = _vector.axpy(-2 * damp * d_damp, x, q)
        dx = _damped(plain, constants, x, q, damp, rhs, derivative)
    return leaves, jax.tree.leaves(dx)


def _undamped(
    spec: Spec,
    constants: Sequence[Array],
    x: Vector,
    residual: Vector,
    rhs: Vector,
    derivative: LinearOperator,
) -> Vector:
    operator = spec.operator(constants)
    if not (spec.full_rank and spec.wide):  # else A x = b, and r is rounding
        s, _ = solve(spec.T, constants, derivative.rmatvec(residual))
        rhs = _vector.add(rhs, s)
    if spec.full_rank and spec.tall:  # then A has no null space for x to turn into
        return solve(spec, constants, rhs)[0]
    y, _ = solve(spec.T, constants, x)
    v = derivative.rmatvec(y)
    dx, _ = solve(spec, constants, _vector.subtract(rhs, operator.matvec(v)))
    return _vector.add(dx, v)


def _damped(
    spec: Spec,
    constants: Sequence[Array],
    x: Vector,
    q: Vector,
    damp: Scalar,
    rhs: Vector,
    derivative: LinearOperator,
) -> Vector:
    """H⁻¹(Aᵀ rhs + q) by two solves, also where a traced λ turns out to be zero.

    With s = (AAᵀ + λ²I)⁻¹A q and the gap q − Aᵀs = λ²H⁻¹q, both of these hold exactly:

        H⁻¹q = v + H⁻¹Aᵀ(s − A v)                 with v = gap / λ²,
        H⁻¹q = [A; λI]⁺ (s, t)                    with t = gap / λ.

    The gap is a difference of nearly equal vectors where λ is small, in error by about the
    solver's tolerance ε. The first form leaves ε²/λ² of that in the solution, the second ε²/λ, so
    the second is used. But [A; λI] is as tall as x is long, which a direct solver cannot afford for
    a wide A; there the first form does no harm, for r is of the order of λ² itself.
    """
    operator = spec.operator(constants)
    s, _ = solve(spec.T, constants, q, damp)
    gap = _vector.subtract(q, operator.rmatvec(s))
    rhs = _vector.add(rhs, s)

    nonzero = damp != 0
    inverse = jnp.where(nonzero, 1 / jnp.where(nonzero, damp, 1), 0)
    v = _vector.zeros_like(gap)
    if spec.damping == "unknown" and not (spec.full_rank and spec.tall):
        # If λ is zero, this is the undamped rule; if not, a zero right-hand side ends at once.
        y, _ = solve(spec.undamped.T, constants, _vector.where(nonzero, _vector.zeros_like(x), x))
        v = derivative.rmatvec(y)
    if spec.tall:
        rhs = (_vector.subtract(rhs, operator.matvec(v)), _vector.scale(inverse, gap))
        dx, _ = solve(spec.augmented, [*constants, damp], rhs)
    else:
        v = _vector.axpy(inverse, _vector.scale(inverse, gap), v)
        dx, _ = solve(spec, constants, _vector.subtract(rhs, operator.matvec(v)), damp)
    return _vector.add(dx, v)


def _derivative_of_operator(
    spec: Spec, constants: Sequence[Array], tangents: dict[int, Array]
) -> LinearOperator:
    """dA, for the given tangents of the constants."""
    if not tangents:
        return LinearOperator(
            lambda v: _vector.zeros_like(spec.rows),
            lambda u: _vector.zeros_like(spec.columns),
            spec.columns,
            spec.rows,
        )

    def derivative(apply: Callable[[Sequence[Array], Vector], Vector]) -> Callable:
        def at(vector: Vector) -> Vector:
            def moved(values: dict[int, Array]) -> Vector:
                return apply([values.get(i, c) for i, c in enumerate(constants)], vector)

            return jax.jvp(moved, ({i: constants[i] for i in tangents},), (tangents,))[1]

        return at

    return LinearOperator(derivative(spec.apply), derivative(spec.T.apply), spec.columns, spec.rows)


ad.primitive_jvps[lstsq_p] = _jvp
ad.primitive_transposes[lstsq_p] = _transpose
