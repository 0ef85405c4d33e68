"""Symmetry groups: their elements, products and inverses, and uniform samples.

An element is an integer or an array, of one shape for each group, so that all of this works under
`jit` and `vmap`. How an element acts on data is the business of `representations`.

>>> import jax
>>> from constrainx.constraints import groups
>>> square = groups.Dihedral(4)
>>> turn, flip = square.generators
>>> bool(square.compose(flip, turn) == square.compose(square.inverse(turn), flip))
True
>>> groups.SpecialOrthogonal(3).sample(jax.random.key(0), 10).shape
(10, 3, 3)
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

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


class _Numbered(FiniteGroup):
    """A group whose elements are the integers from 0 up to its order."""

    @property
    def elements(self) -> Int[np.ndarray, " order"]:
        return np.arange(self.order)

    def sample(self, key: Array, count: int) -> Int[Array, " count"]:
        return jax.random.randint(key, (count,), 0, self.order)


@dataclasses.dataclass(frozen=True)
class Cyclic(_Numbered):
    """Rotations of the plane by multiples of 360°/n: the element k is k steps anticlockwise."""

    n: int

    dimension = 2
    identity = 0

    def __post_init__(self) -> None:
        _check_size(self.n, argument="Cyclic(n=...)")

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
        """As many steps clockwise."""
        return -g % self.n

    def matrix(self, g: Element) -> Float[Array, "2 2"]:
        """The rotation of (x, y) with x to the right and y upwards."""
        return jnp.asarray(_rotations(self.n), dtype=float)[g]


@dataclasses.dataclass(frozen=True)
class Dihedral(_Numbered):
    """Rotations by multiples of 360°/n and reflections: the 2n symmetries of a regular n-gon.

    The element f n + k with k < n is rᵏ sᶠ: first the reflection s of left and right if f = 1, then
    k steps r anticlockwise. So s r s = r⁻¹.
    """

    n: int

    dimension = 2
    identity = 0

    def __post_init__(self) -> None:
        _check_size(self.n, argument="Dihedral(n=...)")

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
        """As many steps clockwise; a reflection is its own inverse."""
        flip = g // self.n
        return flip * self.n + ((2 * flip - 1) * g) % self.n

    def matrix(self, g: Element) -> Float[Array, "2 2"]:
        """The orthogonal matrix on (x, y) with x to the right and y upwards."""
        rotations = _rotations(self.n)
        both = np.concatenate([rotations, rotations @ np.diag([-1.0, 1.0])])
        return jnp.asarray(both, dtype=float)[g]


class _OrthogonalMatrices(Group):
    """A group whose elements are their own orthogonal matrices."""

    n: int

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
        return g


@dataclasses.dataclass(frozen=True)
class Orthogonal(_OrthogonalMatrices):
    """O(n), rotations and reflections of n-dimensional space: an element is its n×n matrix."""

    n: int

    def __post_init__(self) -> None:
        _check_size(self.n, argument="Orthogonal(n=...)")

    def sample(self, key: Array, count: int) -> Float[Array, "count n n"]:
        """Haar samples: the Q of a Gaussian matrix's QR factorisation with R's diagonal positive.

        Without that sign the distribution would depend on the algorithm behind QR (Mezzadri, "How
        to generate random matrices from the classical compact groups", 2007).
        """
        q, r = jnp.linalg.qr(jax.random.normal(key, (count, self.n, self.n)))
        return q * jnp.where(jnp.diagonal(r, axis1=-2, axis2=-1) < 0, -1, 1)[:, None, :]


@dataclasses.dataclass(frozen=True)
class SpecialOrthogonal(_OrthogonalMatrices):
    """SO(n), the rotations of n-dimensional space: an element is its n×n matrix."""

    n: int

    def __post_init__(self) -> None:
        _check_size(self.n, argument="SpecialOrthogonal(n=...)")

    def sample(self, key: Array, count: int) -> Float[Array, "count n n"]:
        """Haar samples: those of O(n), the first column reflected where the determinant is −1."""
        q = Orthogonal(self.n).sample(key, count)
        return q.at[:, :, 0].multiply(jnp.where(jnp.linalg.det(q) < 0, -1, 1)[:, None])


@dataclasses.dataclass(frozen=True)
class Permutation(FiniteGroup):
    """All permutations of n things: the element g is the vector of integers with i ↦ g[i]."""

    n: int

    def __post_init__(self) -> None:
        _check_size(self.n, argument="Permutation(n=...)")

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
            raise ValueError(
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
            raise ValueError(
                "`Translation(shape=...)` must be the grid's shape, such as (28, 28), got "
                f"{self.shape!r}."
            )
        for size in self.shape:
            _check_size(size, argument="Translation(shape=...)")
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
        raise TypeError("`Translation` has no defining matrix. Let it act through `Image()`.")

    def sample(self, key: Array, count: int) -> Int[Array, "count axes"]:
        """Uniform random shifts."""
        return jax.random.randint(key, (count, len(self.shape)), 0, np.array(self.shape))


@dataclasses.dataclass(frozen=True)
class MatrixGroup(_Numbered):
    """A finite group of your own matrices: the element k is the k-th of them.

    >>> from constrainx.constraints.groups import MatrixGroup
    >>> MatrixGroup.generated_by([[[0, -1], [1, 0]]]).order
    4

    Attributes:
        matrices: all matrices of the group, a nested sequence or an array of shape (order, n, n).
            That they are a group, to about five digits, is checked when it is made.
    """

    matrices: Any

    def __post_init__(self) -> None:
        stack = _as_stack(self.matrices, argument="MatrixGroup(matrices=...)")
        # Nested tuples, because arrays have no hash.
        nested = tuple(tuple(tuple(map(float, row)) for row in matrix) for matrix in stack)
        object.__setattr__(self, "matrices", nested)
        _multiplication_table(nested)

    @classmethod
    def generated_by(cls, generators: Any, *, most: int = 200) -> MatrixGroup:
        """The group of all products of some matrices; an error if there are more than ``most``."""
        stack = _as_stack(generators, argument="MatrixGroup.generated_by(generators)")
        found = [np.eye(stack.shape[-1])]
        for matrix, generator in ((m, g) for m in found for g in stack):  # `found` grows meanwhile
            if _find(found, matrix @ generator) is None:
                found.append(matrix @ generator)
            if len(found) > most:
                raise ValueError(
                    f"`MatrixGroup.generated_by(generators)` made more than most={most} matrices. "
                    "If the group is finite, raise `most`, or give the generators with more digits."
                )
        return cls(np.stack(found))

    @property
    def dimension(self) -> int:
        """The size of the matrices."""
        return len(self.matrices[0])

    @property
    def order(self) -> int:
        """The number of matrices."""
        return len(self.matrices)

    @property
    def identity(self) -> int:
        """The position of the identity matrix."""
        return int(np.argmax(_multiplication_table(self.matrices)[:, 0] == 0))

    @property
    def generators(self) -> Int[np.ndarray, " some"]:
        """Each matrix that is not a product of those before it."""
        table = _multiplication_table(self.matrices)
        chosen: list[int] = []
        reached = [self.identity]
        for candidate in range(self.order):
            if candidate not in reached:
                chosen.append(candidate)
                for product in (int(table[g, h]) for g in reached for h in chosen):
                    if product not in reached:
                        reached.append(product)  # and the loop goes on with it
        return np.array(chosen, int)

    def compose(self, g: Element, h: Element) -> Int[Array, ""]:
        """By the multiplication table."""
        return jnp.asarray(_multiplication_table(self.matrices))[g, h]

    def inverse(self, g: Element) -> Int[Array, ""]:
        """By the multiplication table."""
        table = _multiplication_table(self.matrices)
        return jnp.asarray(np.argmax(table == self.identity, axis=1))[g]

    def matrix(self, g: Element) -> Float[Array, "n n"]:
        """The matrix as it was given."""
        return jnp.asarray(self.matrices, dtype=float)[g]


def _check_size(size: Any, *, argument: str) -> None:
    if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
        raise ValueError(f"`{argument}` takes integers of at least 1, got {size!r}.")


@functools.cache
def _rotations(n: int) -> Float[np.ndarray, "n 2 2"]:
    angles = 2 * np.pi * np.arange(n) / n
    cos, sin = np.cos(angles), np.sin(angles)
    # Rounded, so that quarter turns are exact.
    return np.round(np.moveaxis(np.array([[cos, -sin], [sin, cos]]), -1, 0), 15)


def _as_stack(matrices: Any, *, argument: str) -> Float[np.ndarray, "order n n"]:
    try:
        stack = np.asarray(matrices, dtype=float)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`{argument}` must be matrices of one shape, got {matrices!r}."
        ) from error
    if stack.ndim != 3 or stack.shape[1] != stack.shape[2] or not stack.size:
        raise ValueError(
            f"`{argument}` must be square matrices in an array of shape (order, n, n), got shape "
            f"{stack.shape}."
        )
    if not np.isfinite(stack).all():
        raise ValueError(f"`{argument}` must be finite, got {stack!r}.")
    return stack


def _find(stack: Any, matrix: np.ndarray) -> int | None:
    found = np.isclose(stack, matrix, rtol=1e-5, atol=1e-5).all(axis=(-1, -2))
    return int(np.argmax(found)) if found.any() else None


@functools.cache
def _multiplication_table(matrices: tuple) -> Int[np.ndarray, "order order"]:
    """The position of the product of each pair; an error if the matrices are not a group."""
    stack = np.array(matrices)
    fix = "List each element once, or use `MatrixGroup.generated_by(...)`."
    for i, matrix in enumerate(stack):
        if (first := _find(stack, matrix)) != i:
            raise ValueError(
                f"`MatrixGroup(matrices=...)`: matrices[{i}] equals matrices[{first}]. {fix}"
            )
        if np.linalg.matrix_rank(matrix) < len(matrix):
            raise ValueError(f"`MatrixGroup(matrices=...)`: matrices[{i}] has no inverse. {fix}")
    table = np.empty((len(stack), len(stack)), int)
    for g, h in itertools.product(range(len(stack)), repeat=2):
        product = _find(stack, stack[g] @ stack[h])
        if product is None:
            raise ValueError(
                f"`MatrixGroup(matrices=...)` is not closed under products: matrices[{g}] @ "
                f"matrices[{h}] is not among them. {fix}"
            )
        table[g, h] = product
    return table
