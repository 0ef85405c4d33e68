"""Channels that are permuted along with the pixels."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jaxtyping import Array

from constrainx.constraints._symmetry import Element, FiniteGroup, Group, Representation
from constrainx.constraints.representations._image import Image
from constrainx.constraints.representations._trivial import Trivial
from constrainx.errors import ArgumentError, ArgumentTypeError


@dataclasses.dataclass(frozen=True)
class Regular(Representation):
    """Channels in blocks of |G|, one for each element h, that are permuted along with the pixels.

    (g·F)(h) = ρ(g) F(g⁻¹h) with ρ the base: what group convolutions have as features (Cohen and
    Welling, "Group equivariant convolutional networks", 2016). Unlike `Image`, it lets a filter be
    asymmetric, as long as its rotated copies are the other filters of its block. The channel
    b|G| + h, on the last axis, belongs to block b and to the element h.

    Attributes:
        base: how g acts within a channel: `Image()`, or `Trivial()` where there are no pixels.
    """

    base: Image | Trivial = dataclasses.field(default=Image())

    def __post_init__(self) -> None:
        if not isinstance(self.base, Image | Trivial):
            raise ArgumentTypeError(
                f"`Regular(base=...)` must be `Image()` or `Trivial()`, got {self.base!r}."
            )

    def check(self, group: Group) -> None:
        """Raises an error unless the elements of the group are the numbers 0, 1, …, |G| − 1."""
        if not isinstance(group, FiniteGroup) or not _is_numbered(group):
            raise ArgumentTypeError(
                "`Regular(...)` is for groups whose elements are numbers from 0 up to the order, "
                f"such as Cyclic, Dihedral and MatrixGroup, got {group}."
            )
        self.base.check(group)

    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """Returns the array after its pixels have moved and its channels are permuted."""
        self.check(group)
        assert isinstance(group, FiniteGroup)  # by `check`
        if array.ndim < (3 if self.base == Image() else 1) or array.shape[-1] % group.order:
            raise ArgumentError(
                f"`{self}` of {group} needs a multiple of {group.order} channels on the last axis, "
                f"after height and width if there are pixels, got shape {array.shape}."
            )
        moved = self.base(group, element, array)
        blocks = moved.reshape(*moved.shape[:-1], -1, group.order)
        back = group.inverse(element)
        source = jax.vmap(lambda h: group.compose(back, h))(group.elements)
        # Told that indices are unique, XLA has a fast scatter for the derivative.
        blocks = blocks.at[..., source].get(unique_indices=True, mode="promise_in_bounds")
        return blocks.reshape(moved.shape)


def _is_numbered(group: FiniteGroup) -> bool:
    """Tells whether elements can serve as positions of channels."""
    return not np.ndim(group.identity) and np.array_equal(group.elements, np.arange(group.order))
