"""Permutations, and translations of a grid."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from constrainx.constraints.groups._group import Element, FiniteGroup, check_size
from constrainx.errors import ArgumentError, ArgumentTypeError


@dataclasses.dataclass(frozen=True)
class Permutation(FiniteGroup):
    """All permutations of n things: the element g is the vector of integers with i ↦ g[i]."""

    n: int

    def __post_init__(self) -> None:
        check_size(self.n, argument="Permutation(n=...)")

    @property
    def dimension(self) -> int:
        """The number of things, n."""
        return self.n

    @property
    def identity(self) -> Int[np.ndarray, " n"]:
        """0, 1, …, n−1."""
        return np.arange(self.n)

    @property
    def order(self) -> int:
        """The factorial n!."""
        return math.factorial(self.n)

    @property
    def elements(self) -> Int[np.ndarray, "order n"]:
        """In lexicographic order; an error beyond eight things."""
        if self.n > 8:
            raise ArgumentError(
                f"`Permutation({self.n})` has {self.order} elements, too many to list. Draw some "
                'with `sample`, or use `generators`; in `Equivariance`, elements="sample".'
            )
        return np.array(list(itertools.permutations(range(self.n))))

    @property
    def generators(self) -> Int[np.ndarray, "some n"]:
        """The exchange of the first two things, and the cyclic shift of all."""
        things = self.identity
        exchange = np.concatenate([things[:2][::-1], things[2:]])
        return np.stack([exchange, np.roll(things, 1)])[: self.n - 1]

    def compose(self, g: Element, h: Element) -> Int[Array, " n"]:
        """The permutation i ↦ g[h[i]]."""
        return jnp.asarray(g)[h]

    def inverse(self, g: Element) -> Int[Array, " n"]:
        """The permutation g[i] ↦ i."""
        return jnp.argsort(g)

    def matrix(self, g: Element) -> Float[Array, "n n"]:
        """The permutation matrix, which moves the entry i of a vector to g[i]."""
        return jnp.eye(self.n)[:, g]

    def sample(self, key: Array, count: int) -> Int[Array, "count n"]:
        """Uniform random permutations."""
        return jax.vmap(lambda k: jax.random.permutation(k, self.n))(jax.random.split(key, count))


@dataclasses.dataclass(frozen=True)
class Translation(FiniteGroup):
    """Shifts of a grid that wrap around at its ends: an element is the vector of steps.

    Attributes:
        shape: the grid's, such as (28, 28).
    """

    shape: tuple[int, ...]

    dimension = None

    def __post_init__(self) -> None:
        if not isinstance(self.shape, Sequence) or not self.shape:
            raise ArgumentError(
                "`Translation(shape=...)` must be the grid's shape, such as (28, 28), got "
                f"{self.shape!r}."
            )
        for size in self.shape:
            check_size(size, argument="Translation(shape=...)")
        object.__setattr__(self, "shape", tuple(self.shape))

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
        """In row-major order."""
        return np.indices(self.shape).reshape(len(self.shape), -1).T

    @property
    def generators(self) -> Int[np.ndarray, "some axes"]:
        """One step along each axis."""
        return np.eye(len(self.shape), dtype=int)[np.array(self.shape) > 1]

    def compose(self, g: Element, h: Element) -> Int[Array, " axes"]:
        """The sum modulo the grid's shape."""
        return (g + h) % np.array(self.shape)

    def inverse(self, g: Element) -> Int[Array, " axes"]:
        """As many steps back."""
        return -g % np.array(self.shape)

    def matrix(self, g: Element) -> Float[Array, "n n"]:  # noqa: ARG002
        """Not available: a TypeError."""
        raise ArgumentTypeError(
            "`Translation` has no defining matrix. Let it act through `Image()`."
        )

    def sample(self, key: Array, count: int) -> Int[Array, "count axes"]:
        """Uniform random shifts."""
        return jax.random.randint(key, (count, len(self.shape)), 0, np.array(self.shape))
