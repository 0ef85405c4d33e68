"""The signed mean over the batch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from constrainx.constraints.reductions._flatten import flatten
from constrainx.constraints.reductions._reduction import Reduction, Rows
from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Mean:
    """The signed mean over the batch, with a row for each entry of the output. ``reduce="mean"``.

    Cheap, but errors of opposite sign cancel: an equality holds on average only, and so does an
    inequality, mean(g − bound) ≤ 0, which single examples may exceed.
    """

    def __call__(self, residual: PyTree, *, key: Array) -> Rows:  # noqa: ARG002
        """Returns the mean over the first axis of each array in the residual."""
        if not all(jnp.ndim(leaf) for leaf in jax.tree.leaves(residual)):
            raise ArgumentError(
                '`reduce="mean"` takes the mean over the first axis of the residual, got shapes '
                f'{jax.tree.map(jnp.shape, residual)}. Use `reduce="none"` for a single number.'
            )
        return flatten(jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), residual))

    def for_inequality(self) -> Reduction:
        """Returns itself: the mean of what must be at most zero is at most zero."""
        return self
