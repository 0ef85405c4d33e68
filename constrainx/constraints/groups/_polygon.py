"""Rotations and reflections of a regular polygon."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from constrainx.constraints._numbers import as_count
from constrainx.constraints._symmetry import Element, NumberedGroup, PixelGroup
from constrainx.constraints.representations import Image
from constrainx.errors import ArgumentError


class _PolygonGroup(NumberedGroup, PixelGroup):
    """Symmetries of a regular n-gon, which move pixels onto pixels for n = 1, 2 and 4."""

    n: int

    dimension = 2
    identity = 0
    usual_representation = Image()

    def check_pixels(self) -> None:
        """Raises an error unless n = 1, 2 or 4."""
        if self.n not in (1, 2, 4):
            name = type(self).__name__
            raise ArgumentError(
                f"`Image()` of {self} would have to interpolate between pixels, which is not an "
                f"exact action. Use {name}(1), {name}(2) or {name}(4), or `Vector()` for vectors "
                "in the plane."
            )

    def move_pixels(self, g: Element, array: Array) -> Array:
        """Returns the array after its first two axes are reflected and rotated."""
        if array.ndim < 2:
            raise ArgumentError(
                f"`Image()` needs feature maps (height, width, ...), got shape {array.shape}. If "
                "the output is not a feature map, use `output=Trivial()` or `Invariance`."
            )
        if self.n == 4 and array.shape[0] != array.shape[1]:
            raise ArgumentError(
                f"`Image()` of {self} rotates by 90° and needs square maps, got shape "
                f"{array.shape}. Crop or pad them, or use {type(self).__name__}(2)."
            )
        quarters, flip = g % self.n * (4 // self.n), g // self.n
        if isinstance(g, int | np.integer):
            return jnp.rot90(jnp.flip(array, 1) if flip else array, int(quarters))
        if self.order > self.n:
            array = jnp.where(flip > 0, jnp.flip(array, 1), array)
        array = jnp.where(quarters >= 2, jnp.flip(array, (0, 1)), array)
        return jnp.where(quarters % 2 > 0, jnp.rot90(array), array) if self.n == 4 else array


@dataclasses.dataclass(frozen=True)
class Cyclic(_PolygonGroup):
    """Rotations of the plane by multiples of 360°/n: the element k is k steps anticlockwise."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", as_count(self.n, argument="Cyclic(n=...)"))

    @property
    def order(self) -> int:
        """The number of rotations, n."""
        return self.n

    @property
    def generators(self) -> Int[np.ndarray, " some"]:
        """One step."""
        return np.arange(1, min(2, self.n))

    def compose(self, g: Element, h: Element) -> Element:
        """The sum modulo n."""
        return (g + h) % self.n

    def inverse(self, g: Element) -> Element:
        """The same number of steps clockwise."""
        return -g % self.n

    def matrix(self, g: Element) -> Float[Array, "2 2"]:
        """The rotation of (x, y) with x to the right and y upwards."""
        return jnp.asarray(_make_rotations(self.n), dtype=float)[g]


@dataclasses.dataclass(frozen=True)
class Dihedral(_PolygonGroup):
    """Rotations by multiples of 360°/n and reflections: the 2n symmetries of a regular n-gon.

    The element f n + k with k < n is rᵏ sᶠ: first the reflection s of left and right if f = 1, then
    k steps r anticlockwise. So s r s = r⁻¹.
    """

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", as_count(self.n, argument="Dihedral(n=...)"))

    @property
    def order(self) -> int:
        """The number of rotations and reflections, 2n."""
        return 2 * self.n

    @property
    def generators(self) -> Int[np.ndarray, " some"]:
        """One step, and the reflection."""
        return np.unique([1, self.n])

    def compose(self, g: Element, h: Element) -> Element:
        """The product rᵏ sᶠ rˡ sᵉ, which is rᵏ⁺ˡ sᵉ for f = 0 and rᵏ⁻ˡ s¹⁺ᵉ for f = 1."""
        steps = (g + (1 - 2 * (g // self.n)) * h) % self.n
        return (g // self.n + h // self.n) % 2 * self.n + steps

    def inverse(self, g: Element) -> Element:
        """The same number of steps clockwise; a reflection is its own inverse."""
        flip = g // self.n
        return flip * self.n + ((2 * flip - 1) * g) % self.n

    def matrix(self, g: Element) -> Float[Array, "2 2"]:
        """The orthogonal matrix on (x, y) with x to the right and y upwards."""
        rotations = _make_rotations(self.n)
        both = np.concatenate([rotations, rotations @ np.diag([-1.0, 1.0])])
        return jnp.asarray(both, dtype=float)[g]


@functools.cache
def _make_rotations(n: int) -> Float[np.ndarray, "n 2 2"]:
    angles = 2 * np.pi * np.arange(n) / n
    cos, sin = np.cos(angles), np.sin(angles)
    # Rounded, so that quarter turns are exact.
    return np.round(np.moveaxis(np.array([[cos, -sin], [sin, cos]]), -1, 0), 15)
