"""Feature maps whose pixels move."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from constrainx.constraints.groups import Cyclic, Dihedral, Element, Group, Translation
from constrainx.constraints.representations._representation import Representation
from constrainx.errors import ArgumentError, ArgumentTypeError


@dataclasses.dataclass(frozen=True)
class Image(Representation):
    """Feature maps (height, width, ...) whose pixels move, while channels stay what they are.

    Exact, since pixels are exchanged and never interpolated: rotations by 180° and 90°, the latter
    of square maps only, and reflections for `Cyclic` and `Dihedral`; shifts that wrap around for
    `Translation`, whose grid is the first axes.
    """

    def check(self, group: Group) -> None:
        """Cyclic(n) or Dihedral(n) with n = 1, 2 or 4, or Translation."""
        if not isinstance(group, Cyclic | Dihedral | Translation):
            raise ArgumentTypeError(
                f"`Image()` is for Cyclic, Dihedral and Translation groups, got {group}. Pass "
                "another representation, such as `Vector()`."
            )
        if isinstance(group, Cyclic | Dihedral) and group.n not in (1, 2, 4):
            raise ArgumentError(
                f"`Image()` of {group} would have to interpolate between pixels, which is no exact "
                f"action. Use {type(group).__name__}(1), (2) or (4); or `Vector()` for vectors in "
                "the plane."
            )

    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """The moved pixels."""
        self.check(group)
        if isinstance(group, Translation):
            axes = tuple(range(len(group.shape)))
            if array.shape[: len(axes)] != group.shape:
                raise ArgumentError(
                    f"`Image()` of {group} needs the grid as the first axes, got shape "
                    f"{array.shape}."
                )
            return jnp.roll(array, jnp.asarray(element), axis=axes)
        assert isinstance(group, Cyclic | Dihedral)  # by `check`
        if array.ndim < 2:
            raise ArgumentError(
                f"`Image()` needs feature maps (height, width, ...), got shape {array.shape}. For "
                "an output that is no map, use `output=Trivial()` or `Invariance`."
            )
        if group.n == 4 and array.shape[0] != array.shape[1]:
            raise ArgumentError(
                f"`Image()` of {group} rotates by 90° and needs square maps, got shape "
                f"{array.shape}. Crop or pad them, or use {type(group).__name__}(2)."
            )
        quarters, flip = element % group.n * (4 // group.n), element // group.n
        if isinstance(element, int | np.integer):
            return jnp.rot90(jnp.flip(array, 1) if flip else array, int(quarters))
        if isinstance(group, Dihedral):
            array = jnp.where(flip > 0, jnp.flip(array, 1), array)
        array = jnp.where(quarters >= 2, jnp.flip(array, (0, 1)), array)
        return jnp.where(quarters % 2 > 0, jnp.rot90(array), array) if group.n == 4 else array
