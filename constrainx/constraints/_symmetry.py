"""What a symmetry is: groups, and the representations by which they act on arrays.

The two refer to each other, so their abstract classes are in one file. `representations` knows
groups through these classes only; `groups` imports `representations`, to say which is usual.
"""

from __future__ import annotations

import abc
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float, Int

Element: TypeAlias = Any
"""An element of a group: an integer or an array, as the group's docstring says."""


class Representation(abc.ABC):
    """How a group acts. Subclass it as a frozen dataclass to write your own."""

    def check(self, group: Group) -> None:  # noqa: B027
        """Raises an error if the group cannot act in this way; by default any can."""

    @abc.abstractmethod
    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """Returns the array after the action of the element."""


class Group(abc.ABC):
    """A group. Subclass it, or `FiniteGroup`, as a frozen dataclass to write your own."""

    @property
    def usual_representation(self) -> Representation | None:
        """How the group acts on data unless the user says otherwise; None for `Vector()`."""
        return None

    @property
    @abc.abstractmethod
    def dimension(self) -> int | None:
        """The size n of the defining n×n matrices; None for a group that has none."""

    @property
    @abc.abstractmethod
    def identity(self) -> Element:
        """The element that changes nothing."""

    @abc.abstractmethod
    def compose(self, g: Element, h: Element) -> Element:
        """The product gh: first h, then g."""

    @abc.abstractmethod
    def inverse(self, g: Element) -> Element:
        """The inverse g⁻¹."""

    @abc.abstractmethod
    def matrix(self, g: Element) -> Float[Array, "n n"]:
        """The matrix M(g) that defines the element, with M(gh) = M(g) M(h)."""

    @abc.abstractmethod
    def sample(self, key: Array, count: int) -> Element:
        """Draws ``count`` independent elements from the uniform (Haar) measure, on a new axis 0."""


class FiniteGroup(Group):
    """A group whose elements can be counted."""

    @property
    @abc.abstractmethod
    def order(self) -> int:
        """How many elements there are."""

    @property
    @abc.abstractmethod
    def elements(self) -> Int[np.ndarray, "order ..."]:
        """All elements, on the first axis; NumPy, so that each is a constant under `jit`."""

    @property
    @abc.abstractmethod
    def generators(self) -> Int[np.ndarray, "some ..."]:
        """A few elements of which all others are products: what respects them respects all."""


class NumberedGroup(FiniteGroup):
    """A group whose elements are the integers from 0 up to its order."""

    @property
    def elements(self) -> Int[np.ndarray, " order"]:
        return np.arange(self.order)

    def sample(self, key: Array, count: int) -> Int[Array, " count"]:
        return jax.random.randint(key, (count,), 0, self.order)


class PixelGroup(Group):
    """A group that moves the pixels of a grid, exactly: what `Image` asks for."""

    def check_pixels(self) -> None:
        """Raises an error if the group would have to interpolate; by default it does not."""

    @abc.abstractmethod
    def move_pixels(self, g: Element, array: Array) -> Array:
        """Returns the array, with the grid on its first axes, after its pixels have moved."""


class PermutingGroup(Group):
    """A group that permutes things, as many as its ``dimension``: what `Permute` asks for."""

    @abc.abstractmethod
    def places(self, g: Element) -> Int[Array, " n"]:
        """Returns the vector p of integers for which the thing at i moves to p[i]."""
