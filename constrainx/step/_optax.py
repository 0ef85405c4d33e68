"""Constraints in Optax: any method around any optimizer, or the projection of gradients alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import PyTree

from constrainx.constraints import Composed, Constraint, as_number_or_schedule, compose
from constrainx.errors import ArgumentError, ArgumentTypeError, did_you_mean
from constrainx.step._lagrangian import Lagrangian
from constrainx.step._linearise import SolverChoice
from constrainx.step._method import Method, Point, Taken
from constrainx.step._null_space import NullSpace
from constrainx.step._penalty import Penalty
from constrainx.step._report import ConstrainedState, ConstraintState, initial_state
from constrainx.step._unconstrained import Unconstrained

log = logging.getLogger("constrainx")

ConstraintLike: TypeAlias = nnx.Module | Constraint | Callable[..., PyTree] | Composed
MethodName: TypeAlias = Literal["nullspace", "penalty", "lagrangian", "none"]

# Short names for the methods with their defaults.
METHODS: dict[str, Method] = {
    "nullspace": NullSpace(),
    "penalty": Penalty(),
    "lagrangian": Lagrangian(),
    "none": Unconstrained(),
}


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

    After it, an optimizer that scales by coordinate, such as Adam, leaves the null space again;
    `constrain` can project its update, too. The learning rate multiplies γ here.

    Args:
        constraint: a function ``c(params)``, which may also take ``batch`` and ``key``; a
            `Constraint`; a model with attached constraints; what `compose` returns; or a tuple.
        gamma: overrides the constraints' own; a finite number of at least 0, or a schedule.
        model: the model, for a `Constraint` that is not attached.
        solver: "auto", "gram" or a least-squares solver.

    Returns:
        A transformation whose ``update`` takes ``params`` and, where constraints need them,
        ``batch=``, ``key=`` and ``module=``. A constraint that does not act at a step is not
        evaluated, and its report keeps the last violation, unless ``measure=`` is true.
    """
    method = NullSpace(placement="gradient", solver=solver)
    constraints = _compose(constraint, model, gamma)
    warned: set[str] = set()

    def init(params: PyTree) -> ConstraintState:
        del params
        return initial_state(constraints)

    def update(
        updates: PyTree, state: ConstraintState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, ConstraintState]:
        point = _point(constraints, params, state, extra)
        _warn_of_hidden(point, warned)
        taken = method.take(point, updates, lambda gradients: (gradients, None), ())
        return taken.update, _advance(state, taken, point)

    return optax.GradientTransformationExtraArgs(init, update)


def constrain(
    optimizer: optax.GradientTransformation,
    constraint: ConstraintLike | tuple[ConstraintLike, ...],
    *,
    gamma: float | Callable[[Any], Any] | None = None,
    model: nnx.Module | None = None,
    method: Method | MethodName = "nullspace",
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer respect constraints.

    With the default method, rows that depend on the parameters alone obey J u = −γ c in each update
    u, whatever the optimizer did, momentum, adaptive scaling, weight decay, clipping and schedules
    included, and training ends at a solution of the constrained problem. Rows that depend on the
    batch or the key are projected in the gradient; see `NullSpace` for the choice.

    Args:
        optimizer: any Optax optimizer.
        constraint: as in `nullspace`.
        gamma: overrides the constraints' own; a finite number of at least 0, or a schedule. Where
            updates are projected, a number of at most 2, see `NullSpace`. Methods that do not pull
            by γ, such as `Penalty`, have no use for it.
        model: the model, for a `Constraint` that is not attached.
        method: `NullSpace`, `Penalty`, `Lagrangian`, `Unconstrained` or a `Method` of your own;
            "nullspace", "penalty", "lagrangian" and "none" are short for their defaults.

    Returns:
        A transformation whose ``update`` takes ``params`` and, where constraints need them,
        ``batch=``, ``key=`` and ``module=``. A constraint that does not act at a step is not
        evaluated, and its report keeps the last violation, unless ``measure=`` is true.
    """
    chosen = as_method(method)
    optimizer = optax.with_extra_args_support(optimizer)
    if isinstance(chosen, Unconstrained):
        constraints = Composed(())  # nothing to measure, and nothing to report
        if gamma is not None:
            as_number_or_schedule(gamma, argument="gamma=...")
    else:
        constraints = _compose(constraint, model, gamma)
    if hasattr(chosen, "check"):
        chosen.check(constraints)
    warned: set[str] = set()

    def init(params: PyTree) -> ConstrainedState:
        remembered = chosen.init(constraints, params)
        return ConstrainedState(optimizer.init(params), initial_state(constraints, remembered))

    def update(
        updates: PyTree, state: ConstrainedState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, ConstrainedState]:
        inner, outer = state

        @jax.named_scope("update")
        def optimize(gradients: PyTree) -> tuple[PyTree, optax.OptState]:
            return optimizer.update(gradients, inner, params, **extra)

        point = _point(constraints, params, outer, extra)
        _warn_of_hidden(point, warned)
        taken = chosen.take(point, updates, optimize, outer.multipliers)
        outer = _advance(outer, taken, point)
        return taken.update, ConstrainedState(taken.optimizer, outer)

    return optax.GradientTransformationExtraArgs(init, update)


def as_method(method: Any, *, argument: str = "method=...") -> Method:
    """A method by its short name, or as it is."""
    if isinstance(method, str):
        if method not in METHODS:
            raise ArgumentError(
                f"`{argument.replace('...', repr(method))}` must be one of {list(METHODS)} or an "
                f"object such as `cx.NullSpace()`.{did_you_mean(method, METHODS)}"
            )
        return METHODS[method]
    if isinstance(method, type) or not isinstance(method, Method):
        raise ArgumentTypeError(
            f"`{argument}` must be one of {list(METHODS)} or an object with the methods `init` "
            f"and `take`, such as `cx.Penalty(weight=0.1)`, got {method!r}."
        )
    return method


def _compose(
    constraint: Any, model: nnx.Module | None, gamma: float | Callable[[Any], Any] | None
) -> Composed:
    items = constraint if isinstance(constraint, tuple) else (constraint,)
    return compose(*items, model=model, gamma=gamma)


def _point(
    constraints: Composed, params: PyTree, state: ConstraintState, extra: dict[str, Any]
) -> Point:
    if params is None:
        raise ArgumentError(
            "constraints are linearised at the parameters: call `update(grads, state, params)`."
        )
    fix = "pass `module=model` to `update`, with the model that these parameters were taken from"
    key = extra.get("key")
    key = jax.random.fold_in(jax.random.key(0), state.step) if key is None else key
    constraints.check_current(params, extra.get("batch"), key, extra.get("module"), fix=fix)
    return Point(
        constraints=constraints.at(state.step),
        parameters=params,
        step=state.step,
        batch=extra.get("batch"),
        key=key,
        model=extra.get("module"),
        measure=extra.get("measure", False),
    )


def _warn_of_hidden(point: Point, warned: set[str]) -> None:
    """Says once if constraints depend on parameters that `optax.masked` and the like hide."""

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    hidden = jax.tree.map(is_masked, point.parameters, is_leaf=is_masked)
    if not any(jax.tree.leaves(hidden)):
        return
    keys = point.constraints.keys(point.key)
    for member, key in zip(point.constraints, keys, strict=True):
        if member.name in warned:
            continue
        warned.add(member.name)
        read = member.find_hidden(point.parameters, hidden, point.batch, key)
        if read:
            more = f" and {len(read) - 3} more" if len(read) > 3 else ""
            log.warning(
                "constraint %r depends on %s%s, which `optax.masked` or `optax.multi_transform` "
                "hides from it: each step obeys as if they stood still. Unless they do, put "
                "`constrain` around the whole optimizer, not around a part of it.",
                member.name, ", ".join(read[:3]), more,
            )  # fmt: skip


def _advance(state: ConstraintState, taken: Taken, point: Point) -> ConstraintState:
    """The next state; figures keep their dtypes, so that the state's type does not change."""
    reports, removed, trusted = jax.tree.map(
        lambda new, old: jnp.asarray(new, jnp.result_type(old)),
        (taken.reports, taken.removed, taken.trusted),
        (state.reports, state.removed, state.trusted),
    )
    for member in point.constraints:
        needed = point.needs(member)
        if needed is not None:
            new, old = reports[member.name], state.reports[member.name]
            reports[member.name] = new._replace(
                violation=jnp.where(needed, new.violation, old.violation),
                met=jnp.where(needed, new.met, old.met),
            )
    return ConstraintState(state.step + 1, reports, taken.multipliers, removed, trusted)
