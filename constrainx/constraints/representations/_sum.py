"""Direct sums of representations."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from constrainx.constraints._symmetry import Element, Group, Representation
from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True, init=False)
class Sum(Representation):
    """A direct sum: pieces of the last axis, each with its own representation.

    Attributes:
        parts: pairs of a length and a representation, in their order on the axis.
    """

    parts: tuple[tuple[int, Representation], ...]

    def __init__(self, *parts: Any) -> None:
        # One list of pairs is accepted in place of the pairs.
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
        """Raises an error unless the group can act on each part."""
        for _, part in self.parts:
            part.check(group)

    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """Returns the pieces, each after its own action."""
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


def _is_list_of_pairs(part: Any) -> bool:
    return isinstance(part, tuple | list) and all(isinstance(p, tuple | list) for p in part)


def _is_part(size: Any, representation: Any) -> bool:
    return (
        isinstance(size, int | np.integer)
        and int(size) > 0
        and isinstance(representation, Representation)
    )
