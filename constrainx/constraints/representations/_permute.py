"""Entries along an axis that change places."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from constrainx.constraints.groups import Element, Group, Permutation
from constrainx.constraints.representations._representation import Representation
from constrainx.errors import ArgumentError, ArgumentTypeError


@dataclasses.dataclass(frozen=True)
class Permute(Representation):
    """Entries along an axis change places: what was at i is at g[i] afterwards.

    Attributes:
        axis: the axis, without the batch axis, of the things that are permuted.
    """

    axis: int = 0

    def check(self, group: Group) -> None:
        """A group of permutations."""
        if not isinstance(group, Permutation):
            raise ArgumentTypeError(f"`Permute(...)` is for Permutation groups, got {group}.")

    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """The array in its new order."""
        self.check(group)
        assert isinstance(group, Permutation)  # by `check`
        if not -array.ndim <= self.axis < array.ndim or array.shape[self.axis] != group.n:
            raise ArgumentError(
                f"`Permute(axis={self.axis})` of {group} needs {group.n} entries along that axis "
                f"of an example, got shape {array.shape}."
            )
        source = group.inverse(element)
        return jnp.take(array, source, axis=self.axis, unique_indices=True, mode="clip")
