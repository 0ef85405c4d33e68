"""The derivative of least squares, from which forward mode, reverse mode and all mixtures follow.

A solve is linear in its right-hand side, and its transpose is a solve with Aᵀ. So reverse mode
costs as many solves as forward mode, and stores nothing that grows with the iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jaxtyping import Array

from constrainx.linalg._perturbation import Solved, solution_tangent
from constrainx.linalg._primitive import Axes, bind, lstsq_p, solve, unflatten
from constrainx.linalg._spec import Spec


def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Any],
    *,
    spec: Spec,
    batch: tuple[Axes, ...],
    **unused: Any,  # noqa: ARG001
) -> tuple[list[Array], list]:
    moving = [i for i, tangent in enumerate(tangents) if not _is_zero(tangent)]

    def rule(primals: list[Array], moved: list[Array]) -> tuple[list[Array], list[Array]]:
        return _pushforward(spec, primals, dict(zip(moving, moved, strict=True)))

    for axes in batch:
        rule = jax.vmap(rule, in_axes=(list(axes), [axes[i] for i in moving]))
    # JAX hands literals over as another type of array.
    outputs, dx = rule(
        [jnp.asarray(primal) for primal in primals], [jnp.asarray(tangents[i]) for i in moving]
    )
    info = outputs[len(dx) :]
    return outputs, [*dx, *(ad.Zero(jax.typeof(leaf).to_tangent_aval()) for leaf in info)]


def _transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    spec: Spec,
    batch: tuple[Axes, ...],
    **unused: Any,  # noqa: ARG001
) -> list:
    constants, _, scalars = spec.split(operands)
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
    spec: Spec, primals: Sequence[Array], tangents: dict[int, Array]
) -> tuple[list[Array], list[Array]]:
    """All outputs, and the tangent of the solution; missing tangents are zero."""
    outputs = bind(*primals, spec=spec)
    constants, b_leaves, scalars = spec.split(primals)
    first_b, first_scalar = len(constants), len(constants) + len(b_leaves)
    rows = jax.tree.structure(spec.rows)
    solved = Solved(
        spec=spec.without_reference,
        constants=constants,
        b=jax.tree.unflatten(rows, b_leaves),
        damp=None if spec.damping == "none" else scalars[0],
        x=unflatten(spec, outputs)[0],
    )
    d_b = [
        tangents.get(i, jnp.zeros(leaf.shape, leaf.dtype))
        for i, leaf in enumerate(b_leaves, start=first_b)
    ]
    dx = solution_tangent(
        solved,
        {i: tangent for i, tangent in tangents.items() if i < first_b},
        jax.tree.unflatten(rows, d_b),
        None if spec.damping == "none" else tangents.get(first_scalar),
    )
    return outputs, jax.tree.leaves(dx)


ad.primitive_jvps[lstsq_p] = _jvp
ad.primitive_transposes[lstsq_p] = _transpose
