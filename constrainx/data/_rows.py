"""One process's contiguous rows of the global batches of a Grain data set."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import grain
from jaxtyping import PyTree


class Rows(grain.MapDataset):
    """Local element i is element (s + ⌊i/b⌋)·B + p·b + i mod b of the parent.

    B is the size of the global batch, b that of this process p, s the first step. Grain's own
    ``ElasticIterator`` gives process p every P-th example instead, and then the order of examples
    within the global batch depends on P.

    Past the parent's end comes its last element, over and over: a full last batch of a pass.
    """

    def __init__(
        self, parent: grain.MapDataset, *, batch: int, rows: slice, step: int, steps: int
    ) -> None:
        super().__init__(parent)
        self._batch = batch
        self._first = rows.start
        self._count = rows.stop - rows.start
        self._step = step
        self._length = steps * self._count
        self._last = len(parent) - 1

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return self._parent[self._position(index)]

    def _getitems(self, indices: Sequence[int]) -> Sequence[Any]:
        return self._parent._getitems([self._position(index) for index in indices])

    def _position(self, index: int) -> int:
        step, row = divmod(index, self._count)
        return min((self._step + step) * self._batch + self._first + row, self._last)

    def __str__(self) -> str:
        return f"Rows[{self._first}:{self._first + self._count} of {self._batch}]"

    @property
    def _element_spec(self) -> PyTree:
        return grain.experimental.get_element_spec(self._parent)


def endless(examples: grain.MapDataset, *, batch: int, rows: slice, step: int) -> grain.MapDataset:
    """This process's rows of all batches from a step on, of a data set that repeats."""
    steps = sys.maxsize // batch - step
    return Rows(examples, batch=batch, rows=rows, step=step, steps=steps).batch(
        rows.stop - rows.start
    )


def one_pass(examples: grain.MapDataset, *, batch: int, rows: slice) -> grain.MapDataset:
    """This process's rows of the batches of one pass, the last of them filled up."""
    steps = -(-len(examples) // batch)
    return Rows(examples, batch=batch, rows=rows, step=0, steps=steps).batch(rows.stop - rows.start)
