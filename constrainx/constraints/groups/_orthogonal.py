"""Rotations and reflections of space, with Haar samples."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from constrainx.constraints._numbers import as_count
from constrainx.constraints._symmetry import Element, Group
from constrainx.constraints.representations import Vector


class _OrthogonalMatrices(Group):
    """A group whose elements are their own orthogonal matrices."""

    n: int

    usual_representation = Vector()

    @property
    def dimension(self) -> int:
        return self.n

    @property
    def identity(self) -> Float[Array, "n n"]:
        return jnp.eye(self.n)

    def compose(self, g: Element, h: Element) -> Float[Array, "n n"]:
        return jnp.matmul(g, h, precision="highest")

    def inverse(self, g: Element) -> Float[Array, "n n"]:
        return jnp.swapaxes(g, -1, -2)

    def matrix(self, g: Element) -> Float[Array, "n n"]:
        return jnp.asarray(g)


@dataclasses.dataclass(frozen=True)
class Orthogonal(_OrthogonalMatrices):
    """O(n), rotations and reflections of n-dimensional space: an element is its n×n matrix."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", as_count(self.n, argument="Orthogonal(n=...)"))

    def sample(self, key: Array, count: int) -> Float[Array, "count n n"]:
        """Draws Haar samples: Q of the QR factorisation of a Gaussian matrix, diag(R) positive.

        Without that choice of signs the distribution would depend on the algorithm behind QR
        (Mezzadri, "How to generate random matrices from the classical compact groups", 2007).
        """
        q, r = jnp.linalg.qr(jax.random.normal(key, (count, self.n, self.n)))
        return q * jnp.where(jnp.diagonal(r, axis1=-2, axis2=-1) < 0, -1, 1)[:, None, :]


@dataclasses.dataclass(frozen=True)
class SpecialOrthogonal(_OrthogonalMatrices):
    """SO(n), the rotations of n-dimensional space: an element is its n×n matrix."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", as_count(self.n, argument="SpecialOrthogonal(n=...)"))

    def sample(self, key: Array, count: int) -> Float[Array, "count n n"]:
        """Draws from O(n), and flips the first column where the determinant is −1."""
        q = Orthogonal(self.n).sample(key, count)
        return q.at[:, :, 0].multiply(jnp.where(jnp.linalg.det(q) < 0, -1, 1)[:, None])
