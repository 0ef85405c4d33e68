"""Permutations."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from constrainx.constraints._numbers import as_count
from constrainx.constraints._symmetry import Element, FiniteGroup, PermutingGroup
from constrainx.constraints.representations import Permute
from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Permutation(FiniteGroup, PermutingGroup):
    """All permutations of n things: the element g is the vector of integers with i ↦ g[i]."""

    n: int

    usual_representation = Permute(axis=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", as_count(self.n, argument="Permutation(n=...)"))

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
        """All permutations in lexicographic order; an error beyond eight things."""
        if self.n > 8:
            raise ArgumentError(
                f"`Permutation({self.n})` has {self.order} elements, too many to list. Draw some "
                'with `sample`, or use `generators`; in `Equivariance`, elements="sample".'
            )
        return np.array(list(itertools.permutations(range(self.n))))

    @property
    def generators(self) -> Int[np.ndarray, "some n"]:
        """The swap of the first two things, and the cyclic shift of all."""
        things = self.identity
        swap = np.concatenate([things[:2][::-1], things[2:]])
        return np.stack([swap, np.roll(things, 1)])[: self.n - 1]

    def compose(self, g: Element, h: Element) -> Int[Array, " n"]:
        """The permutation i ↦ g[h[i]]."""
        return jnp.asarray(g)[h]

    def inverse(self, g: Element) -> Int[Array, " n"]:
        """The permutation g[i] ↦ i."""
        return jnp.argsort(g)

    def places(self, g: Element) -> Int[Array, " n"]:
        """The element itself."""
        return jnp.asarray(g)

    def matrix(self, g: Element) -> Float[Array, "n n"]:
        """The permutation matrix, which moves the entry i of a vector to g[i]."""
        return jnp.eye(self.n)[:, g]

    def sample(self, key: Array, count: int) -> Int[Array, "count n"]:
        """Draws uniform random permutations."""
        return jax.vmap(lambda k: jax.random.permutation(k, self.n))(jax.random.split(key, count))
