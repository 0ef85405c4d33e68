"""Errors for arguments that cannot work: what was given, what is allowed, how to fix it."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from constrainx.errors import ArgumentError, ArgumentTypeError
from constrainx.linalg._problem import Solver


def check_at_least(owner: str, name: str, value: object, smallest: float) -> None:
    """Raises unless ``value`` is a number that is at least ``smallest``; infinity is fine."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(
            f"`{owner}({name}=...)` must be a Python number, got {value!r} of type "
            f"{type(value).__name__}. Solvers are static: their fields cannot be traced arrays."
        )
    if math.isnan(value) or value < smallest:
        raise ArgumentError(f"`{owner}({name}=...)` must be at least {smallest:g}, got {value!r}.")


def check_iterations(owner: str, value: object) -> None:
    """Raises unless ``value`` is None or a positive integer."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(
            f"`{owner}(max_iterations=...)` must be an integer or None, got {value!r} of type "
            f"{type(value).__name__}."
        )
    if value < 1:
        raise ArgumentError(f"`{owner}(max_iterations=...)` must be at least 1, got {value!r}.")


def check_solver(solver: object) -> None:
    """Raises unless ``solver`` is an object with a ``solve`` method."""
    if isinstance(solver, type) or not isinstance(solver, Solver):
        came = (
            f"the class {solver.__name__}"
            if isinstance(solver, type)
            else f"{solver!r} of type {type(solver).__name__}"
        )
        raise ArgumentTypeError(
            f"`solver` must be an instance with a `solve` method, such as `LSMR(rtol=1e-6)`, got "
            f"{came}."
        )
    try:
        hash(solver)
    except TypeError as error:
        raise ArgumentTypeError(
            f"`solver` must be hashable, because JAX compiles for it, and {type(solver).__name__} "
            "is not: make it a frozen dataclass, `@dataclasses.dataclass(frozen=True)`."
        ) from error


def check_floating(name: str, tree: PyTree) -> None:
    """Raises unless the tree has leaves, and all are real floating-point arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ArgumentError(f"`{name}` has no arrays in it: {tree!r}.")
    for path, leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            where = jax.tree_util.keystr(path)
            raise ArgumentTypeError(
                f"`{name}{where}` must be a real floating-point array, got {leaf.dtype}. "
                "Cast it, for example with `.astype(jnp.float32)`."
            )


def check_fits(name: str, tree: PyTree, wanted: PyTree, what: str) -> None:
    """Raises unless both trees have the same structure and shapes."""
    if not fits(tree, wanted):
        raise ArgumentError(
            f"`{name}` does not fit {what}: got {describe(tree)}, wanted {describe(wanted)}."
        )


def fits(tree: PyTree, wanted: PyTree) -> bool:
    """Whether both trees have the same structure and shapes."""
    shapes: Any = jax.tree.map(jnp.shape, tree)
    wanted_shapes: Any = jax.tree.map(jnp.shape, wanted)
    return bool(shapes == wanted_shapes)


def describe(tree: PyTree) -> str:
    """Shapes and dtypes of a tree in one line, `float32[3, 2]` for a single array."""

    def name(leaf: Any) -> str:
        return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"

    return str(jax.tree.map(name, tree)).replace("'", "")
