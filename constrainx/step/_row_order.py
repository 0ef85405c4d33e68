"""In which order the rows of single examples are computed, and in which they are asked for."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np


class RowOrder(NamedTuple):
    """Rows of single examples, of a residual with one or several arrays.

    They are computed example by example. A residual of several arrays has all rows of the first
    array before those of the second.

    Attributes:
        examples: how many there are.
        outputs: how many rows an example has, array by array.
    """

    examples: int
    outputs: tuple[int, ...]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.examples * sum(self.outputs)

    @property
    def permutation(self) -> np.ndarray | None:
        """Where each row is in the order in which they are computed; None for the same order."""
        if len(self.outputs) == 1:
            return None
        numbers = np.arange(self.rows).reshape(self.examples, -1)
        ends = itertools.accumulate(self.outputs)
        pieces = zip(self.outputs, ends, strict=True)
        return np.concatenate([numbers[:, end - size : end].ravel() for size, end in pieces])

    @property
    def inverse(self) -> np.ndarray | None:
        """Where each row that is computed is asked for; None for the same order."""
        permutation = self.permutation
        return None if permutation is None else np.argsort(permutation)
