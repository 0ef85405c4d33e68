"""A row for each group of examples: the norm of its residuals."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from constrainx.constraints._numbers import as_count
from constrainx.constraints.reductions._clipped import Clipped
from constrainx.constraints.reductions._flatten import flatten
from constrainx.constraints.reductions._reduction import Reduction, Rows
from constrainx.constraints.reductions._root_mean_square import root_mean_square
from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Norm:
    """A row for each group of examples: the root mean square of its residuals.

    Many rows are what makes the null space beat a penalty, and rows on disjoint examples are cheap:
    their gradients, or the inner products of these, come from one backward pass over the batch.
    The residual must treat each example on its own, as every layer does but a batch normalisation
    in training mode. ``reduce="norm"`` is short for a row for each example.

    Attributes:
        groups: the number of rows, which must divide the batch; None for one row per example.
    """

    nonnegative: ClassVar[bool] = True

    groups: int | None = None

    def __post_init__(self) -> None:
        if self.groups is not None:
            fix = "Use None for one row per example."
            groups = as_count(self.groups, argument="Norm(groups=...)", fix=fix)
            object.__setattr__(self, "groups", groups)

    def slices(self, batch: PyTree) -> int:
        """Returns how many groups a batch is cut into."""
        examples = _count_examples(batch)
        groups = examples if self.groups is None else self.groups
        if examples % groups:
            raise ArgumentError(
                f"`Norm(groups={groups})` must divide the batch, but that has {examples} examples. "
                f"Use one of {[n for n in range(1, examples + 1) if examples % n == 0]}."
            )
        return groups

    def __call__(self, residual: PyTree, *, key: Array) -> Rows:  # noqa: ARG002
        """Returns the one row of a group."""
        return root_mean_square(flatten(residual))[None]

    def for_inequality(self) -> Reduction:
        """Returns the norms of max(r, 0)."""
        return Clipped(self)


def _count_examples(batch: PyTree) -> int:
    """Returns the length of the first axis, which all arrays of a batch share."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    sizes = {shape[0] if shape else 0 for shape in shapes}
    if len(sizes) != 1 or 0 in sizes:
        raise ArgumentError(
            '`reduce="norm"` and `Norm(groups=...)` need a batch of arrays that share their first '
            f"axis, the examples, and at least one example; got {jax.tree.map(jnp.shape, batch)}."
        )
    return sizes.pop()
