"""Data on which a group does nothing."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array

from constrainx.constraints._symmetry import Element, Group, Representation


@dataclasses.dataclass(frozen=True)
class Trivial(Representation):
    """Nothing changes: masses, charges, the logits of classes."""

    def __call__(self, group: Group, element: Element, array: Array) -> Array:  # noqa: ARG002
        """Returns the array as it is."""
        return array
