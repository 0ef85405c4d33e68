"""Feature maps whose pixels move."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array

from constrainx.constraints._symmetry import Element, Group, PixelGroup, Representation
from constrainx.errors import ArgumentTypeError


@dataclasses.dataclass(frozen=True)
class Image(Representation):
    """Feature maps (height, width, ...) whose pixels move, while channels stay what they are.

    Exact, since pixels are exchanged and never interpolated: rotations by 180° and 90°, the latter
    of square maps only, and reflections for `Cyclic` and `Dihedral`; shifts that wrap around for
    `Translation`, whose grid is the first axes.
    """

    def check(self, group: Group) -> None:
        """Raises an error unless the group can move pixels without interpolation."""
        if not isinstance(group, PixelGroup):
            raise ArgumentTypeError(
                "`Image()` is for groups that move pixels, such as Cyclic, Dihedral and "
                f"Translation, got {group}. Pass another representation, such as `Vector()`."
            )
        group.check_pixels()

    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """Returns the array after its pixels have moved."""
        self.check(group)
        assert isinstance(group, PixelGroup)  # by `check`
        return group.move_pixels(element, array)
