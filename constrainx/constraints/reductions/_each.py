"""A row for each entry of the residual."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, PyTree

from constrainx.constraints.reductions._flatten import flatten
from constrainx.constraints.reductions._reduction import Reduction, Rows


@dataclasses.dataclass(frozen=True)
class Each:
    """Makes every entry of the residual a row. ``reduce="none"`` is short for it."""

    def __call__(self, residual: PyTree, *, key: Array) -> Rows:  # noqa: ARG002
        """Returns the residual's entries in one vector."""
        return flatten(residual)

    def for_inequality(self) -> Reduction:
        """Returns itself: each entry must be at most zero."""
        return self
