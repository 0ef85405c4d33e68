"""Constraints in Optax: projected gradients, projected updates, and the classical rivals."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import PyTree

from constrainx.constraints import Composed, Constraint, compose
from constrainx.errors import ArgumentError
from constrainx.step._project import SolverChoice, project
from constrainx.step._report import NullspaceState, initial_state
from constrainx.step._rivals import lagrangian, penalty

ConstraintLike: TypeAlias = nnx.Module | Constraint | Callable[..., PyTree] | Composed
Metric: TypeAlias = Literal["identity", "optimizer"]
Method: TypeAlias = Literal["nullspace", "penalty", "lagrangian", "none"]


class ConstrainedState(NamedTuple):
    """The optimizer's state, and that of the constraints."""

    optimizer: optax.OptState
    constraints: NullspaceState


def nullspace(
    constraint: ConstraintLike | tuple[ConstraintLike, ...],
    *,
    gamma: float | Callable[[Any], Any] | None = None,
    model: nnx.Module | None = None,
    solver: SolverChoice = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Projects **gradients**, g ← g − J⁺(J g − γ c), as in the paper.

    Put it in front of any optimizer. The paper's unit-norm example:

    >>> import jax, jax.numpy as jnp, optax, constrainx as cx
    >>> def unit_norm(params):
    ...     return jnp.dot(params, params) - 1.0
    >>> optimizer = optax.chain(cx.nullspace(unit_norm, gamma=1.0), optax.sgd(0.5))
    >>> params = jnp.array([1.0, 1.0])
    >>> state = optimizer.init(params)
    >>> for _ in range(20):
    ...     grads = jax.grad(lambda p: p[0])(params)
    ...     updates, state = optimizer.update(grads, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> print(params.round(2) + 0.0)
    [-1.  0.]

    After the projection, an optimizer with a metric of its own, such as Adam, leaves the null space
    again; `constrain` does not. The learning rate multiplies γ here.

    Args:
        constraint: a function ``c(params)``, which may also take ``batch`` and ``key``; a
            `Constraint`; a model with attached constraints; what `compose` returns; or a tuple.
        gamma: overrides the constraints' own.
        model: the model, for a `Constraint` that is not attached.
        solver: "auto", "gram" or a least-squares solver.

    Returns:
        A transformation whose ``update`` takes ``params`` and, where constraints need them,
        ``batch=``, ``key=`` and ``module=``.
    """
    constraints = _composed(constraint, model, gamma)

    def init(params: PyTree) -> NullspaceState:
        del params
        return initial_state(constraints)

    def update(
        updates: PyTree, state: NullspaceState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, NullspaceState]:
        descent = jax.tree.map(jnp.negative, updates)
        descent, state = _projected(constraints, descent, state, params, None, solver, extra)
        return jax.tree.map(jnp.negative, descent), state

    return optax.GradientTransformationExtraArgs(init, update)


def constrain(
    optimizer: optax.GradientTransformation,
    constraint: ConstraintLike | tuple[ConstraintLike, ...],
    *,
    gamma: float | Callable[[Any], Any] | None = None,
    model: nnx.Module | None = None,
    metric: Metric = "identity",
    solver: SolverChoice = "auto",
    method: Method = "nullspace",
    weight: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Projects the optimizer's **update**, u ← u − D Jᵀ(J D Jᵀ)⁻¹(J u + γ c).

    After it J u = −γ c holds, whatever the optimizer did: momentum, adaptive scaling, weight decay,
    clipping and schedules included.

    Args:
        optimizer: any Optax optimizer.
        constraint: as in `nullspace`.
        gamma: overrides the constraints' own.
        model: the model, for a `Constraint` that is not attached.
        metric: D. "optimizer" takes the diagonal of an adaptive optimizer, 1/√ν of Adam and its
            kin, with which the fixed points are those of the constrained problem.
        solver: "auto", "gram" or a least-squares solver.
        method: "nullspace"; or, for comparison on the same problem, "penalty" and "lagrangian",
            which change the gradient instead, and "none".
        weight: of the penalty, also of that in the augmented Lagrangian.

    Returns:
        A transformation whose ``update`` takes ``params`` and, where constraints need them,
        ``batch=``, ``key=`` and ``module=``.
    """
    methods = ("nullspace", "penalty", "lagrangian", "none")
    if method not in methods:
        near = difflib.get_close_matches(str(method), methods, n=1, cutoff=0.3)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ArgumentError(f"`method` must be one of {methods}, got {method!r}.{hint}")
    if metric not in ("identity", "optimizer"):
        raise ArgumentError(f'`metric` must be "identity" or "optimizer", got {metric!r}.')
    optimizer = optax.with_extra_args_support(optimizer)
    if method == "none":
        return optimizer
    constraints = _composed(constraint, model, gamma)
    if method == "penalty":
        return optax.chain(penalty(constraints, weight), optimizer)
    if method == "lagrangian":
        return optax.chain(lagrangian(constraints, weight), optimizer)

    def init(params: PyTree) -> ConstrainedState:
        return ConstrainedState(optimizer.init(params), initial_state(constraints))

    def update(
        updates: PyTree, state: ConstrainedState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, ConstrainedState]:
        updates, inner = optimizer.update(updates, state.optimizer, params, **extra)
        weights = _diagonal(inner, params) if metric == "optimizer" else None
        updates, outer = _projected(
            constraints, updates, state.constraints, params, weights, solver, extra
        )
        return updates, ConstrainedState(inner, outer)

    return optax.GradientTransformationExtraArgs(init, update)


def _composed(
    constraint: Any, model: nnx.Module | None, gamma: float | Callable[[Any], Any] | None
) -> Composed:
    items = constraint if isinstance(constraint, tuple) else (constraint,)
    return compose(*items, model=model, gamma=gamma)


def _projected(
    constraints: Composed,
    update: PyTree,
    state: NullspaceState,
    params: PyTree,
    metric: PyTree | None,
    solver: SolverChoice,
    extra: dict[str, Any],
) -> tuple[PyTree, NullspaceState]:
    if params is None:
        raise ArgumentError(
            "constraints are linearised at the parameters: call `update(grads, state, params)`."
        )
    key = extra.get("key")
    key = jax.random.fold_in(jax.random.key(0), state.step) if key is None else key
    step = project(
        update,
        constraints,
        params,
        batch=extra.get("batch"),
        key=key,
        step=state.step,
        model=extra.get("module"),
        metric=metric,
        solver=solver,
    )
    reports = jax.tree.map(
        lambda new, old: jnp.asarray(new, old.dtype), step.reports, state.reports
    )
    return step.update, NullspaceState(state.step + 1, reports)


def _diagonal(state: optax.OptState, params: PyTree) -> PyTree | None:
    """1/√ν of an adaptive optimizer, or None if it keeps no second moments."""
    moments = optax.tree_utils.tree_get_all_with_path(state, "nu")
    if not moments:
        return None
    (_, nu), *_ = moments
    # Bias correction and ε: the metric's overall scale does not matter, but zero would.
    largest = optax.tree.max(jax.tree.map(jnp.max, nu))
    floor = 1e-8 * jnp.sqrt(largest) + jnp.finfo(jnp.float32).tiny
    return jax.tree.map(lambda n, p: (1 / (jnp.sqrt(n) + floor)).astype(p.dtype), nu, params)
