"""N of each M weights along the input axis, as sparse matrix units of GPUs want them."""

from __future__ import annotations

import re
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from constrainx.errors import ArgumentError


class Pattern(NamedTuple):
    """Keep ``kept`` of every ``group`` weights that follow each other along the input axis.

    Attributes:
        kept: how many of a group stay.
        group: how many weights are a group.
    """

    kept: int
    group: int

    @property
    def density(self) -> float:
        """The fraction of weights that stay."""
        return self.kept / self.group

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether kernels of this shape, inputs on the last axis but one, can be cut in groups."""
        return len(shape) >= 2 and shape[-2] % self.group == 0


def parse_pattern(text: str, *, argument: str = "pattern") -> Pattern:
    """Reads a pattern such as "2:4".

    >>> parse_pattern("2:4")
    Pattern(kept=2, group=4)
    """
    found = re.fullmatch(r"(\d+):(\d+)", text) if isinstance(text, str) else None
    pattern = Pattern(*map(int, found.groups())) if found else None
    if pattern is None or not 0 < pattern.kept < pattern.group:
        raise ArgumentError(
            f'`{argument}` must say how many of how many weights to keep, such as "2:4", got '
            f"{text!r}."
        )
    return pattern


def split_groups(kernel: Float[Array, ...], size: int) -> Float[Array, ...]:
    """A kernel with its input axis cut in groups: (..., inputs / size, size, outputs)."""
    *before, inputs, outputs = kernel.shape
    return kernel.reshape(*before, inputs // size, size, outputs)


def keep_in_groups(
    values: Float[Array, ...], ties: Float[Array, ...], size: int, kept: int | Int[Array, ...]
) -> Bool[Array, ...]:
    """Marks the largest values of each group; among equal ones those with larger ``ties``.

    Compares each with each in its group, which for groups of four is cheaper than sorting.

    Args:
        values: a kernel, or something of its shape.
        ties: of the same shape.
        size: of a group.
        kept: how many to mark in a group, one number or one for each, shaped as a group's sum.
    """
    value, tie = (split_groups(array, size) for array in (values, ties))
    order = jnp.arange(size)[:, None]
    rank = jnp.zeros(value.shape, jnp.int32)
    for j in range(size):
        other, its_tie = value[..., j : j + 1, :], tie[..., j : j + 1, :]
        is_ahead = (its_tie > tie) | ((its_tie == tie) & (j < order))
        rank = rank + ((other > value) | ((other == value) & is_ahead))
    return (rank < kept).reshape(values.shape)
