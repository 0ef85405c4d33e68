"""Representations: how an element of a group acts on an array.

Each is a frozen dataclass that is called with a group, an element and the array of one example,
without the batch axis, such that ρ(gh) = ρ(g)ρ(h). Shapes stay as they are.

>>> import jax.numpy as jnp
>>> from constrainx.constraints import groups, representations
>>> half_turn = 2
>>> representations.Image()(groups.Cyclic(4), half_turn, jnp.arange(4).reshape(2, 2)).tolist()
[[3, 2], [1, 0]]
>>> masses_and_positions = representations.Sum(
...     (5, representations.Trivial()), (15, representations.Vector())
... )
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from constrainx.constraints.groups import (
    Cyclic,
    Dihedral,
    Element,
    FiniteGroup,
    Group,
    Permutation,
    Translation,
)
from constrainx.errors import ArgumentError, ArgumentTypeError


class Representation(abc.ABC):
    """How a group acts. Subclass it as a frozen dataclass to bring your own."""

    def check(self, group: Group) -> None:  # noqa: B027
        """Raises an error if the group cannot act in this way; by default any can."""

    @abc.abstractmethod
    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """The array after the action of the element."""


@dataclasses.dataclass(frozen=True)
class Trivial(Representation):
    """Nothing changes: masses, charges, the logits of classes."""

    def __call__(self, group: Group, element: Element, array: Array) -> Array:  # noqa: ARG002
        """The array as it is."""
        return array


@dataclasses.dataclass(frozen=True)
class Vector(Representation):
    """Vectors v ↦ R v, R the element's defining matrix.

    The last axis has one vector or several in a row: shapes (n,), (k, n) and (k n,) are all fine,
    and in the last the first n entries are the first vector.

    Attributes:
        copies: how many vectors the last axis has; None for as many as there are.
    """

    copies: int | None = None

    def check(self, group: Group) -> None:
        """The group must have matrices."""
        _check_matrices(self, group)

    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """The rotated vectors."""
        matrix = group.matrix(element)
        size = matrix.shape[-1]
        copies, rest = divmod(array.shape[-1] if array.ndim else 0, size)
        if rest or not copies or copies != (self.copies or copies):
            raise ArgumentError(
                f"`{self}` of {group} needs {self.copies or 'one or more'} vectors of {size} "
                f"entries on the last axis, got shape {array.shape}."
            )
        return _rotate(matrix, array.reshape(*array.shape[:-1], -1, size), rank=1, like=array)


@dataclasses.dataclass(frozen=True)
class Tensor(Representation):
    """Tensors of any rank, each index rotated by the defining matrix: T ↦ R T Rᵀ for rank 2.

    Either the last ``rank`` axes are of length n each, or the last axis has one tensor or several
    in a row, n**rank entries each.

    Attributes:
        rank: the number of indices.
    """

    rank: int

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 0:
            raise ArgumentError(f"`Tensor(rank=...)` must be an integer ≥ 0, got {self.rank!r}.")

    def check(self, group: Group) -> None:
        """The group must have matrices."""
        _check_matrices(self, group)

    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """The rotated tensors."""
        matrix = group.matrix(element)
        shape = (matrix.shape[-1],) * self.rank
        if array.ndim >= self.rank and array.shape[array.ndim - self.rank :] == shape:
            return _rotate(matrix, array, rank=self.rank, like=array)
        if not array.ndim or not array.shape[-1] or array.shape[-1] % math.prod(shape):
            raise ArgumentError(
                f"`{self}` of {group} takes arrays of shape (..., {', '.join(map(str, shape))}) or "
                f"(..., k*{math.prod(shape)}), got shape {array.shape}."
            )
        tensors = array.reshape(*array.shape[:-1], -1, *shape)
        return _rotate(matrix, tensors, rank=self.rank, like=array)


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


@dataclasses.dataclass(frozen=True)
class Regular(Representation):
    """Channels in blocks of |G|, one for each element h, that are permuted along with the pixels.

    (g·F)(h) = ρ(g) F(g⁻¹h) with ρ the base: what group convolutions have as features (Cohen and
    Welling, "Group equivariant convolutional networks", 2016). Unlike `Image`, it lets a filter be
    asymmetric, as long as its rotated copies are the other filters of its block. The channel
    b|G| + h, on the last axis, belongs to block b and to the element h.

    Attributes:
        base: how g acts within a channel: `Image()`, or `Trivial()` where there are no pixels.
    """

    base: Image | Trivial = Image()

    def __post_init__(self) -> None:
        if not isinstance(self.base, Image | Trivial):
            raise ArgumentTypeError(
                f"`Regular(base=...)` must be `Image()` or `Trivial()`, got {self.base!r}."
            )

    def check(self, group: Group) -> None:
        """A group whose elements are numbered: Cyclic, Dihedral or MatrixGroup."""
        if not isinstance(group, FiniteGroup) or np.ndim(group.identity):
            raise ArgumentTypeError(
                f"`Regular(...)` is for groups whose elements are numbers: Cyclic, Dihedral and "
                f"MatrixGroup, got {group}."
            )
        self.base.check(group)

    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """The permuted channels of moved pixels."""
        self.check(group)
        assert isinstance(group, FiniteGroup)  # by `check`
        if array.ndim < (3 if self.base == Image() else 1) or array.shape[-1] % group.order:
            raise ArgumentError(
                f"`{self}` of {group} needs a multiple of {group.order} channels on the last axis, "
                f"after height and width if there are pixels, got shape {array.shape}."
            )
        moved = self.base(group, element, array)
        blocks = moved.reshape(*moved.shape[:-1], -1, group.order)
        back = group.inverse(element)
        source = jax.vmap(lambda h: group.compose(back, h))(group.elements)
        # Told that indices are unique, XLA has a fast scatter for the derivative.
        blocks = blocks.at[..., source].get(unique_indices=True, mode="promise_in_bounds")
        return blocks.reshape(moved.shape)


@dataclasses.dataclass(frozen=True)
class Permute(Representation):
    """Entries along an axis change places: what was at i is at g[i] afterwards.

    Attributes:
        axis: the axis, without the batch axis, of the things that are permuted.
    """

    axis: int = 0

    def check(self, group: Group) -> None:
        """A group of permutations."""
        if not isinstance(group, Permutation):
            raise ArgumentTypeError(f"`Permute(...)` is for Permutation groups, got {group}.")

    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """The array in its new order."""
        self.check(group)
        assert isinstance(group, Permutation)  # by `check`
        if not -array.ndim <= self.axis < array.ndim or array.shape[self.axis] != group.n:
            raise ArgumentError(
                f"`Permute(axis={self.axis})` of {group} needs {group.n} entries along that axis "
                f"of an example, got shape {array.shape}."
            )
        source = group.inverse(element)
        return jnp.take(array, source, axis=self.axis, unique_indices=True, mode="clip")


@dataclasses.dataclass(frozen=True, init=False)
class Sum(Representation):
    """A direct sum: pieces of the last axis, each with its own representation.

    Attributes:
        parts: pairs of a length and a representation, in their order on the axis.
    """

    parts: tuple[tuple[int, Representation], ...]

    def __init__(self, *parts: Any) -> None:
        # One list of pairs is as good as the pairs themselves.
        pairs = parts[0] if len(parts) == 1 and _is_list_of_pairs(parts[0]) else parts
        for pair in pairs:
            if not (isinstance(pair, tuple | list) and len(pair) == 2 and _is_part(*pair)):
                raise ArgumentError(
                    "`Sum(...)` takes pairs of a length and a representation, such as "
                    f"`Sum((5, Trivial()), (15, Vector()))`, got {pair!r}."
                )
        if not pairs:
            raise ArgumentError(
                "`Sum(...)` needs at least one pair of a length and a representation."
            )
        object.__setattr__(self, "parts", tuple(map(tuple, pairs)))

    def check(self, group: Group) -> None:
        """The group must act on each part."""
        for _, part in self.parts:
            part.check(group)

    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """The pieces, each after its own action."""
        sizes = [size for size, _ in self.parts]
        if not array.ndim or array.shape[-1] != sum(sizes):
            raise ArgumentError(
                f"`Sum(...)` of lengths {sizes} needs {sum(sizes)} entries on the last axis, got "
                f"shape {array.shape}."
            )
        pieces = jnp.split(array, np.cumsum(sizes)[:-1], axis=-1)
        moved = [
            part(group, element, piece) for (_, part), piece in zip(self.parts, pieces, strict=True)
        ]
        return jnp.concatenate(moved, axis=-1)


def _rotate(matrix: Float[Array, "n n"], tensors: Array, *, rank: int, like: Array) -> Array:
    """The last ``rank`` axes rotated, in the shape of ``like`` and, if inexact, in its dtype."""
    # In half precision R would not be orthogonal, so the product is in R's own.
    result = tensors.astype(jnp.result_type(tensors, matrix))
    for axis in range(result.ndim - rank, result.ndim):
        rotated = jnp.tensordot(result, matrix, axes=(axis, 1), precision="highest")
        result = jnp.moveaxis(rotated, -1, axis)
    dtype = like.dtype if jnp.issubdtype(like.dtype, jnp.inexact) else result.dtype
    return result.reshape(like.shape).astype(dtype)


def _check_matrices(representation: Representation, group: Group) -> None:
    if group.dimension is None:
        raise ArgumentTypeError(
            f"`{representation}` needs a group with matrices, such as Orthogonal(3), got {group}. "
            "Translations act through `Image()`."
        )


def _is_list_of_pairs(part: Any) -> bool:
    return isinstance(part, tuple | list) and all(isinstance(p, tuple | list) for p in part)


def _is_part(size: Any, representation: Any) -> bool:
    return isinstance(size, int) and size > 0 and isinstance(representation, Representation)
