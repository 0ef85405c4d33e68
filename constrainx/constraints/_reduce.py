"""From raw residuals to the rows of the constraint function c."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from constrainx.errors import ArgumentError, ArgumentTypeError

Rows: TypeAlias = Float[Array, " rows"]


@dataclasses.dataclass(frozen=True)
class Each:
    """Every entry of the residual is a row. ``reduce="none"`` is short for it."""

    def __call__(self, residual: PyTree, *, key: Array) -> Rows:  # noqa: ARG002
        """The residual's entries in one vector."""
        return flatten(residual)


@dataclasses.dataclass(frozen=True)
class Norm:
    """A row for each group of examples: the root mean square over its residuals' entries.

    Rows are what makes the null space beat a penalty, and rows on disjoint examples are cheap:
    their gradients, or the inner products of these, come from one backward pass over the batch.
    That needs a residual that treats each example on its own, as every layer but a batch
    normalisation in training mode does.

    Attributes:
        groups: how many rows; None for a row an example. Must divide the batch.
    """

    groups: int | None = None

    def __post_init__(self) -> None:
        if self.groups is not None and self.groups < 1:
            raise ArgumentError(f"`Norm(groups=...)` must be at least 1, got {self.groups!r}.")

    def slices(self, batch: PyTree) -> int:
        """How many groups a batch is cut into."""
        examples = batch_size(batch)
        groups = examples if self.groups is None else self.groups
        if examples % groups:
            raise ArgumentError(
                f"`Norm(groups={groups})` must divide the batch, but that has {examples} examples. "
                f"Use one of {[n for n in range(1, examples + 1) if examples % n == 0]}."
            )
        return groups

    def __call__(self, residual: PyTree, *, key: Array) -> Rows:  # noqa: ARG002
        """The one row of a group that was cut out already."""
        return root_mean_square(flatten(residual))[None]


@dataclasses.dataclass(frozen=True)
class Mean:
    """The signed mean over the batch, a row an entry of the output: cheap, but errors cancel."""

    def __call__(self, residual: PyTree, *, key: Array) -> Rows:  # noqa: ARG002
        """The mean over the first axis of each array in the residual."""
        return flatten(jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), residual))


@dataclasses.dataclass(frozen=True)
class RootMeanSquare:
    """One row: the root mean square of all residuals. ``reduce="rms"`` is short for it."""

    def __call__(self, residual: PyTree, *, key: Array) -> Rows:  # noqa: ARG002
        """The root mean square."""
        return root_mean_square(flatten(residual))[None]


@dataclasses.dataclass(frozen=True)
class Sketch:
    """Random signed combinations of all residuals: smooth at zero, at a cost that the user chooses.

    Zero for every draw of the signs exactly where the residual is; the squared norm of the rows is
    the residual's mean square in expectation.

    Attributes:
        rows: how many combinations.
    """

    rows: int = 16

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ArgumentError(f"`Sketch(rows=...)` must be at least 1, got {self.rows!r}.")

    def __call__(self, residual: PyTree, *, key: Array) -> Rows:
        """The combinations, with new signs for each key."""
        entries = flatten(residual)
        signs = jax.random.rademacher(key, (self.rows, entries.size), entries.dtype)
        return signs @ entries / jnp.sqrt(self.rows * entries.size).astype(entries.dtype)


Reduction: TypeAlias = Each | Norm | Mean | RootMeanSquare | Sketch

_NAMED: dict[str, Reduction] = {
    "none": Each(),
    "norm": Norm(),
    "mean": Mean(),
    "rms": RootMeanSquare(),
}


def as_reduction(reduce: Any, *, owner: str) -> Reduction:
    """The reduction by its name, or as it is."""
    if isinstance(reduce, str):
        if reduce not in _NAMED:
            near = difflib.get_close_matches(reduce, _NAMED, n=1, cutoff=0.3)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ArgumentError(
                f"`{owner}(reduce={reduce!r})` is not a reduction: use one of {sorted(_NAMED)}, "
                f"`Norm(groups=...)` or `Sketch(rows=...)`.{hint}"
            )
        return _NAMED[reduce]
    if not isinstance(reduce, Each | Norm | Mean | RootMeanSquare | Sketch):
        raise ArgumentTypeError(
            f"`{owner}(reduce=...)` must be one of {sorted(_NAMED)} or a reduction such as "
            f"`Norm(groups=...)`, got {reduce!r}."
        )
    return reduce


def flatten(residual: PyTree) -> Rows:
    """All entries of the residual in one vector of at least float32."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(residual)]
    if not leaves:
        raise ArgumentError("`residual` returned no arrays. It must return at least one.")
    dtype = jnp.result_type(jnp.float32, *leaves)
    return jnp.concatenate([leaf.reshape(-1).astype(dtype) for leaf in leaves])


def root_mean_square(entries: Float[Array, " n"]) -> Float[Array, ""]:
    """√mean(e²), with the gradient zero where all entries are zero."""
    square = jnp.mean(jnp.square(entries))
    # The square root has an infinite slope at zero; `where` on both sides keeps NaN out.
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


def batch_size(batch: PyTree) -> int:
    """The length of the first axis, which all arrays of a batch share."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    sizes = {shape[0] if shape else -1 for shape in shapes}
    if len(sizes) != 1 or -1 in sizes:
        raise ArgumentError(
            '`reduce="norm"` needs a batch whose arrays share their first axis, the examples; got '
            f"{jax.tree.map(jnp.shape, batch)}."
        )
    return sizes.pop()
