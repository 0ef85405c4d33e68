"""Constraints on modules: recorded on the module, so that they travel with it."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, TypeVar

from flax import nnx

from constrainx.constraints._constraint import Constraint
from constrainx.errors import ArgumentTypeError

# Not `constraints`, which many models use for something else.
ATTRIBUTE = "attached_constraints"
Model = TypeVar("Model", bound=nnx.Module)
Path: TypeAlias = tuple[Any, ...]


class Attached(NamedTuple):
    """A constraint and where in the model it sits; the empty path is the root."""

    path: Path
    constraint: Constraint


def attach(module: Model, *constraints: Constraint) -> Model:
    """Records constraints on a module, the whole model or a part of it, and returns the module.

    A constraint on a submodule is given that submodule as its ``model``. Constraints are static:
    they show in ``print(model)``, survive `nnx.split`, `nnx.merge` and `nnx.clone`, hold no arrays
    that would be trained or saved, and cost nothing until an optimizer asks for them.

    >>> import constrainx as cx
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> model = cx.attach(model, cx.UnitNorm(of=lambda m: m.kernel[...], gamma=1.0))
    >>> print(*(found.constraint.label for found in cx.constraints_of(model)))
    unit-norm
    """
    if not isinstance(module, nnx.Module):
        raise ArgumentTypeError(
            f"`attach` takes an nnx.Module and constraints, got {type(module).__name__} first."
        )
    for constraint in constraints:
        _check(constraint)
    existing = getattr(module, ATTRIBUTE, ())
    setattr(module, ATTRIBUTE, (*existing, *constraints))
    return module


def _check(constraint: Any) -> None:
    if isinstance(constraint, type):
        raise ArgumentTypeError(
            f"`attach` takes constraints, got the class {constraint.__name__}: call it to make one."
        )
    if not isinstance(constraint, Constraint):
        raise ArgumentTypeError(f"`attach` takes instances of `Constraint`, got {constraint!r}.")


def constraints_of(model: nnx.Module) -> tuple[Attached, ...]:
    """All constraints attached to a model and to its parts, the root's first."""
    found = [
        Attached(tuple(path), constraint)
        for path, module in nnx.iter_modules(model)
        for constraint in getattr(module, ATTRIBUTE, ())
    ]
    return tuple(sorted(found, key=lambda attached: (len(attached.path), str(attached.path))))


def at_path(model: Any, path: Path) -> Any:
    """What is at a path, through attributes and through items of lists and dictionaries."""
    for step in path:
        has_items = isinstance(step, int) or isinstance(model, dict)
        model = model[step] if has_items else getattr(model, step)
    return model
