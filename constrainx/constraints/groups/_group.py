"""What a group is."""

from __future__ import annotations

import abc
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from constrainx.errors import ArgumentError

Element: TypeAlias = Any
"""An element of a group: an integer or an array, as the group's docstring says."""


class Group(abc.ABC):
    """A group. Subclass it, or `FiniteGroup`, as a frozen dataclass to bring your own."""

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
        """So many independent elements from the uniform (Haar) measure, on a new first axis."""


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


class Numbered(FiniteGroup):
    """A group whose elements are the integers from 0 up to its order."""

    @property
    def elements(self) -> Int[np.ndarray, " order"]:
        return np.arange(self.order)

    def sample(self, key: Array, count: int) -> Int[Array, " count"]:
        return jax.random.randint(key, (count,), 0, self.order)


def check_size(size: Any, *, argument: str) -> None:
    """Raises unless the size is a positive integer."""
    if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
        raise ArgumentError(f"`{argument}` takes integers of at least 1, got {size!r}.")
