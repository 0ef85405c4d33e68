"""What a reduction is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

from jaxtyping import Array, Float, PyTree

Rows: TypeAlias = Float[Array, " rows"]


class Reduction(Protocol):
    """Turns residuals into rows; any hashable object that can be called like this is one.

    A frozen dataclass is hashable; so is a plain function. Two methods are optional:

    - ``slices(batch) -> int``, see `SlicedReduction`;
    - ``for_inequality() -> Reduction``, the reduction to use for constraints r ≤ 0. Its rows must
      be at most zero wherever all residuals are. A reduction whose rows grow with each entry of the
      residual returns itself; one whose rows do so for residuals of at least zero, such as a norm,
      returns `Clipped(self)`. Without this method a reduction is for equalities only.
    """

    def __call__(self, residual: PyTree, *, key: Array) -> Rows:
        """Returns the rows.

        Args:
            residual: what the constraint's ``residual`` returned, a pytree of floating arrays.
            key: for reductions that draw samples; a new one each step.
        """
        ...


@runtime_checkable
class SlicedReduction(Protocol):
    """A reduction with rows on disjoint examples.

    The batch is cut into ``slices(batch)`` equal pieces, the residual is evaluated on each, and the
    reduction makes exactly one row of it. Such rows are cheap: their gradients come from a single
    backward pass over the batch.
    """

    def slices(self, batch: PyTree) -> int:
        """Returns how many pieces the batch is cut into, a divisor of its size."""
        ...

    def __call__(self, residual: PyTree, *, key: Array) -> Rows:
        """Returns the one row of a slice."""
        ...


def slices_of(reduction: Reduction) -> Callable[[PyTree], int] | None:
    """Returns the function that counts slices, or None for rows that share the whole batch."""
    return getattr(reduction, "slices", None)
