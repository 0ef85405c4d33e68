"""What a representation is."""

from __future__ import annotations

import abc

from jaxtyping import Array

from constrainx.constraints.groups import Element, Group


class Representation(abc.ABC):
    """How a group acts. Subclass it as a frozen dataclass to write your own."""

    def check(self, group: Group) -> None:  # noqa: B027
        """Raises an error if the group cannot act in this way; by default any can."""

    @abc.abstractmethod
    def __call__(self, group: Group, element: Element, array: Array) -> Array:
        """Returns the array after the action of the element."""
