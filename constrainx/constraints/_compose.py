"""Several constraints as one batched function with a named slice for each."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, PyTree

from constrainx.constraints._attach import Attached, at_path, constraints_of
from constrainx.constraints._constraint import Constraint
from constrainx.constraints._member import Member
from constrainx.constraints._numbers import as_number_or_schedule
from constrainx.constraints._on_weights import bind_to_weights
from constrainx.constraints._restore import restore_variables
from constrainx.constraints._view import (
    flatten_state,
    list_paths,
    view_model,
)
from constrainx.constraints.reductions import Rows, flatten, slices_of
from constrainx.errors import ArgumentError, ArgumentTypeError


@dataclasses.dataclass(frozen=True)
class Composed:
    """Constraints that act together. Made by `compose`."""

    members: tuple[Member, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the constraints, in the order of their rows."""
        return tuple(member.name for member in self.members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def at(self, step: Array) -> Composed:
        """The constraints as they are at a step."""
        return Composed(tuple(member.at(step) for member in self.members))

    def __call__(
        self, parameters: PyTree, batch: Any = None, key: Array | None = None, model: Any = None
    ) -> dict[str, Rows]:
        """The rows c of each constraint by name, for parameters as the optimizer sees them."""
        fix = "pass the model with its state of now"
        self.check_current(parameters, batch, key, model, fix=fix)
        keys = self.keys(key)
        return {
            member.name: member.rows(parameters, batch, keys[i], model)
            for i, member in enumerate(self.members)
        }

    def check_current(
        self, parameters: PyTree, batch: Any, key: Array | None, model: Any, *, fix: str
    ) -> None:
        """Raises where constraints would read state of a model that may have changed since.

        Args:
            parameters: as the optimizer hands them over.
            batch: for the constraints.
            key: for the constraints.
            model: as it was handed over with the parameters, or None if the constraints hold their
                own.
            fix: how to hand it over, for the message.
        """
        for member, own in zip(self.members, self.keys(key), strict=True):
            if member.model is not None:  # a plain function sees parameters alone
                member.check_current(parameters, batch, own, model, fix=fix)

    def keys(self, key: Array | None) -> list[Array]:
        """A key of its own for each constraint."""
        key = jax.random.key(0) if key is None else key
        return [jax.random.fold_in(key, i) for i in range(len(self.members))]


def compose(
    *constraints: nnx.Module | Constraint | Callable[..., PyTree] | Composed,
    model: nnx.Module | None = None,
    gamma: float | Callable[[Any], Any] | None = None,
) -> Composed:
    """Stacks constraints into one.

    Args:
        *constraints: models with attached constraints, constraints, or plain functions
            ``c(parameters)``, which may also take ``batch``, ``key`` and ``step`` by these names.
        model: the model that the constraints are about, if they are not attached.
        gamma: overrides the γ of all of them, a finite number of at least 0 or an Optax schedule;
            plain functions have 0.1 otherwise.
    """
    members: list[Member] = []
    for item in constraints:
        members += _members(item, model)
    if not members:
        raise ArgumentError(
            "there is nothing to constrain: pass a constraint, or a model to which one was "
            "attached with `cx.attach(model, ...)`."
        )
    if gamma is not None:
        gamma = as_number_or_schedule(gamma, argument="gamma=...")
        members = [dataclasses.replace(member, gamma=gamma) for member in members]
    return Composed(tuple(_with_unique_names(members)))


def _members(item: Any, model: nnx.Module | None) -> list[Member]:
    if isinstance(item, Composed):
        return list(item.members)
    if isinstance(item, nnx.Module):
        return [_of_constraint(found, item) for found in constraints_of(item)]
    if isinstance(item, Constraint):
        return [_of_constraint(Attached((), item), model)]
    if callable(item) and not isinstance(item, type):
        return [_of_function(item)]
    raise ArgumentTypeError(
        "a constraint must be a `Constraint`, a function c(parameters), or a model with attached "
        f"constraints, got {item!r}."
    )


def _of_function(function: Callable[..., PyTree]) -> Member:
    takes = [name for name in ("batch", "key", "step") if takes_argument(function, name)]

    @jax.named_scope("residual")
    def rows(parameters: PyTree, batch: Any, key: Array, model: Any, step: Any = None) -> Rows:  # noqa: ARG001
        values = {"batch": batch, "key": key, "step": step}
        return flatten(function(parameters, **{name: values[name] for name in takes}))

    name = getattr(function, "__name__", "constraint")
    name = "constraint" if name == "<lambda>" else name
    return Member(name, rows, gamma=0.1, takes_step="step" in takes)


def _of_constraint(found: Attached, model: nnx.Module | None) -> Member:
    constraint, reduction = found.constraint, found.constraint.reduction
    if model is None:
        raise ArgumentError(
            f"constraint {constraint.label!r} needs the model that it is about: attach it with "
            "`cx.attach(model, ...)`, or pass `model=`."
        )
    matches = nnx.filterlib.to_predicate(constraint.wrt)
    takes_step = takes_argument(constraint.residual, "step")

    @jax.named_scope("residual")
    def rows(parameters: PyTree, batch: Any, key: Array, module: Any, step: Any = None) -> Rows:
        residual_key, reduction_key = jax.random.split(key)
        current = model if module is None else restore_variables(module, like=model)
        seen = view_model(current, parameters, jax.random.fold_in(key, 2))
        before = _batch_statistics(seen)
        extra = {"step": step} if takes_step else {}
        part = at_path(seen, found.path)
        try:
            residual = constraint.residual(part, batch, key=residual_key, **extra)
        except KeyError as error:
            has = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            # The key may be of anything, so the traceback must stay.
            error.add_note(
                f"constraint {constraint.label!r} looked up {error}, and the batch has {has}. If "
                "it should be there, pass it as `batch=`."
            )
            raise
        after = _batch_statistics(seen)
        if slices is not None and any(a is not b for a, b in zip(before, after, strict=True)):
            raise ArgumentError(
                f"constraint {constraint.label!r} has a row for each group of examples, but its "
                "residual mixes examples: a BatchNorm computed statistics of the batch. Use its "
                'running averages, or a reduction of the whole batch such as `reduce="rms"`.'
            )
        return reduction(residual, key=reduction_key)

    def look(batch: Any, key: Array, module: Any) -> Any:
        current = model if module is None else restore_variables(module, like=model)
        own = jax.random.fold_in(key, 3)
        return constraint.look_at(at_path(current, found.path), batch, own)

    def movable(parameters: PyTree) -> tuple[bool, ...]:
        # An optimizer hands over bare arrays; what they are is known from the model.
        variables = flatten_state(nnx.state(model))
        return tuple(matches(path, variables[path]) for path in list_paths(parameters))

    def nearest(parameters: PyTree, module: Any, step: Any = None) -> PyTree:
        # Which streams it sees does not matter, because it depends on the parameters alone.
        base = model if module is None else restore_variables(module, like=model)
        seen = view_model(base, parameters, jax.random.key(0))
        extra = {"step": step} if takes_step else {}
        constraint.nearest(at_path(seen, found.path), **extra)  # type: ignore[attr-defined]
        variables = flatten_state(nnx.state(seen))
        leaves = [variables[path][...] for path in list_paths(parameters)]
        return jax.tree.unflatten(jax.tree.structure(parameters), leaves)

    slices = slices_of(reduction)
    return Member(
        name=constraint.label,
        function=rows,
        gamma=constraint.gamma,
        damping=constraint.damping,
        start=constraint.start,
        stop=constraint.stop,
        every=constraint.every,
        tolerance=constraint.tolerance,
        kind=constraint.kind,
        slices=slices,
        examples=constraint.examples,
        placement=constraint.placement,
        attached=found,
        movable=movable,
        model=model,
        nearest=nearest if hasattr(constraint, "nearest") else None,
        takes_step=takes_step,
        one_sided=constraint.is_one_sided,
        on_weights=bind_to_weights(constraint, found.path, model),
        look=None if type(constraint).look_at is Constraint.look_at else look,
    )


def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has an argument of that name."""
    return name in inspect.signature(function).parameters


def _batch_statistics(model: nnx.Module) -> list[Array]:
    """The arrays that are the model's batch statistics now."""
    flat = flatten_state(nnx.state(model, nnx.BatchStat))
    return [leaf for variable in flat.values() for leaf in jax.tree.leaves(variable)]


def _with_unique_names(members: Sequence[Member]) -> list[Member]:
    """Tells constraints of one name apart by their module: `encoder.layers.2/mask-budget`.

    Where that is not enough, because two sit on one module, they are numbered.
    """
    counts = collections.Counter(member.name for member in members)
    names = [_name_by_module(m) if counts[m.name] > 1 else m.name for m in members]
    taken: set[str] = set()
    result = []
    for member, name in zip(members, names, strict=True):
        # A number must not make the name of another constraint, whatever the order.
        free = (f"{name}-{n}" for n in itertools.count(2) if f"{name}-{n}" not in names)
        candidates = itertools.chain((name,), free)
        unique = next(candidate for candidate in candidates if candidate not in taken)
        taken.add(unique)
        result.append(dataclasses.replace(member, name=unique))
    return result


def _name_by_module(member: Member) -> str:
    path = member.attached.path if member.attached is not None else ()
    return f"{'.'.join(map(str, path))}/{member.name}" if path else member.name
