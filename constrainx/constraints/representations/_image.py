"""Feature maps whose pixels move."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array

from constrainx.constraints._symmetry import Element, Group, PixelGroup, Representation
from constrainx.errors import ArgumentTypeError


@dataclasses.dataclass(frozen=True)
class Image(Representation):
    """Feature maps (height, width, ...) whose pixels move, while channels stay as they are.

    Exact, since pixels change places and are never interpolated. `Cyclic` and `Dihedral` rotate by
    180°, rotate square maps by 90°, and reflect; `Translation` shifts the first axes, with pixels
    that wrap around. Any other `PixelGroup` brings its own ``move_pixels``.
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
