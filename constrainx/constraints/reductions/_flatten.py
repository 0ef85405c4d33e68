"""All entries of a residual in one vector, after a check that they can be rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from constrainx.constraints.reductions._reduction import Rows
from constrainx.errors import ArgumentError, ArgumentTypeError


def flatten(residual: PyTree, *, owner: str | None = None) -> Rows:
    """Returns all entries of the residual in one vector of at least float32.

    >>> flatten({"a": jnp.ones(2), "b": 3.0}).tolist()
    [1.0, 1.0, 3.0]

    Args:
        residual: a pytree of real floating-point arrays with at least one entry.
        owner: the name of the constraint, for errors.
    """
    check_residual(residual, owner=owner)
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(residual)]
    dtype = jnp.result_type(jnp.float32, *leaves)
    return jnp.concatenate([leaf.reshape(-1).astype(dtype) for leaf in leaves])


def check_residual(residual: PyTree, *, owner: str | None = None) -> None:
    """Raises an error unless the residual is a pytree of real floating-point arrays with entries.

    Args:
        residual: what the constraint's ``residual`` returned.
        owner: the name of the constraint.
    """
    name = "the residual" if owner is None else f"the residual of {owner!r}"
    leaves = jax.tree_util.tree_leaves_with_path(residual)
    for path, leaf in leaves:
        _check_leaf(leaf, f" at {jax.tree_util.keystr(path)}" if path else "", name)
    if not sum(np.size(leaf) for _, leaf in leaves):
        raise ArgumentError(
            f"{name} has no entries, so there is nothing to constrain: it has shapes "
            f"{jax.tree.map(jnp.shape, residual)}. Return at least one number; is the batch empty?"
        )


def _check_leaf(leaf: Any, where: str, name: str) -> None:
    if not isinstance(leaf, int | float | complex | np.generic | np.ndarray | jax.Array):
        raise ArgumentTypeError(
            f"{name} is a {type(leaf).__name__}{where}: {leaf!r}. Return arrays of floating-point "
            "numbers."
        )
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ArgumentTypeError(
            f"{name} is {dtype}{where}, but rows are real. Return its real and imaginary parts, "
            "such as `{'real': r.real, 'imag': r.imag}`."
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ArgumentTypeError(
            f"{name} is {dtype}{where}, which has no derivative for a step to follow. Return a "
            "floating-point number that is zero where the constraint holds."
        )
