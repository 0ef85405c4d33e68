"""Entries along an axis that change places."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from constrainx.constraints._symmetry import Element, Group, PermutingGroup, Representation
from constrainx.errors import ArgumentError, ArgumentTypeError


@dataclasses.dataclass(frozen=True)
class Permute(Representation):
    """Entries along an axis change places: what was at i is at g[i] afterwards.

    Attributes:
        axis: the axis, without the batch axis, of the things that are permuted.
    """

    axis: int = 0

    def check(self, group: Group) -> None:
        """Raises an error unless the group permutes things."""
        if not isinstance(group, PermutingGroup):
            raise ArgumentTypeError(
                f"`Permute(...)` is for groups that permute things, such as Permutation(5), got "
                f"{group}."
            )

    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """Returns the array in its new order."""
        self.check(group)
        assert isinstance(group, PermutingGroup)  # by `check`
        things = group.dimension
        if not -array.ndim <= self.axis < array.ndim or array.shape[self.axis] != things:
            raise ArgumentError(
                f"`Permute(axis={self.axis})` of {group} needs {things} entries along that axis "
                f"of an example, got shape {array.shape}."
            )
        source = group.places(group.inverse(element))
        return jnp.take(array, source, axis=self.axis, unique_indices=True, mode="clip")
