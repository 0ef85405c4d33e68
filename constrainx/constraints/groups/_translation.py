"""Translations of a grid."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from constrainx.constraints._numbers import as_count
from constrainx.constraints._symmetry import Element, FiniteGroup, PixelGroup
from constrainx.constraints.representations import Image
from constrainx.errors import ArgumentError, ArgumentTypeError


@dataclasses.dataclass(frozen=True)
class Translation(FiniteGroup, PixelGroup):
    """Shifts of a grid that wrap around at its ends: an element is the vector of steps.

    Attributes:
        shape: the shape of the grid, such as (28, 28).
    """

    shape: tuple[int, ...]

    dimension = None
    usual_representation = Image()

    def __post_init__(self) -> None:
        if not isinstance(self.shape, Sequence) or not self.shape:
            raise ArgumentError(
                "`Translation(shape=...)` must be the grid's shape, such as (28, 28), got "
                f"{self.shape!r}."
            )
        for size in self.shape:
            as_count(size, argument="Translation(shape=...)")
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))

    @property
    def identity(self) -> Int[np.ndarray, " axes"]:
        """No step."""
        return np.zeros(len(self.shape), int)

    @property
    def order(self) -> int:
        """The number of points of the grid."""
        return math.prod(self.shape)

    @property
    def elements(self) -> Int[np.ndarray, "order axes"]:
        """All shifts in row-major order."""
        return np.indices(self.shape).reshape(len(self.shape), -1).T

    @property
    def generators(self) -> Int[np.ndarray, "some axes"]:
        """One step along each axis."""
        return np.eye(len(self.shape), dtype=int)[np.array(self.shape) > 1]

    def compose(self, g: Element, h: Element) -> Int[Array, " axes"]:
        """The sum modulo the grid's shape."""
        return (g + h) % np.array(self.shape)

    def inverse(self, g: Element) -> Int[Array, " axes"]:
        """The same number of steps back."""
        return -g % np.array(self.shape)

    def move_pixels(self, g: Element, array: Array) -> Array:
        """Returns the array after its first axes are shifted."""
        axes = tuple(range(len(self.shape)))
        if array.shape[: len(axes)] != self.shape:
            raise ArgumentError(
                f"`Image()` of {self} needs the grid as the first axes, got shape {array.shape}."
            )
        return jnp.roll(array, jnp.asarray(g), axis=axes)

    def matrix(self, g: Element) -> Float[Array, "n n"]:  # noqa: ARG002
        """Raises an error: a translation has no matrix."""
        raise ArgumentTypeError(
            "`Translation` has no defining matrix. Let it act through `Image()`."
        )

    def sample(self, key: Array, count: int) -> Int[Array, "count axes"]:
        """Draws uniform random shifts."""
        return jax.random.randint(key, (count, len(self.shape)), 0, np.array(self.shape))
