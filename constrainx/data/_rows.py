"""One process's contiguous rows of the global batches of a Grain data set."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import grain
import jax
import numpy as np
from jaxtyping import PyTree

from constrainx.errors import ArgumentError


class Rows:
    """A process's rows of each batch, by random access, which Grain requires of a source.

    For batch i these are the elements (s + i)·B + p·b to (s + i)·B + (p + 1)·b − 1 of the examples,
    where B is the size of the global batch, b that of process p, and s the first step. Past the end
    of the examples the last of them is repeated, which fills up the last batch of a pass.

    Grain's own ``ElasticIterator`` gives process p every P-th example instead, and then the order
    of examples within the global batch depends on P.
    """

    def __init__(
        self, examples: grain.MapDataset, *, batch: int, rows: slice, step: int, steps: int
    ) -> None:
        self._examples = examples
        self._batch = batch
        self._rows = rows
        self._step = step
        self._steps = steps
        self._last = len(examples) - 1

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> PyTree[np.ndarray]:
        start = (self._step + index) * self._batch
        positions = range(start + self._rows.start, start + self._rows.stop)
        return _stack([self._examples[min(position, self._last)] for position in positions])


def batch_forever(
    examples: grain.MapDataset, *, batch: int, rows: slice, step: int
) -> grain.MapDataset:
    """A process's rows of every batch from a step on, of examples that repeat."""
    steps = sys.maxsize // batch - step
    return grain.MapDataset.source(
        Rows(examples, batch=batch, rows=rows, step=step, steps=steps),
    )


def batch_once(examples: grain.MapDataset, *, batch: int, rows: slice) -> grain.MapDataset:
    """A process's rows of the batches of one pass, the last of which is filled up."""
    steps = -(-len(examples) // batch)
    return grain.MapDataset.source(Rows(examples, batch=batch, rows=rows, step=0, steps=steps))


def _stack(examples: Sequence[Any]) -> PyTree[np.ndarray]:
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)
    except ValueError as error:
        raise ArgumentError(
            f"the examples of a batch must have the same entries and shapes, and stacking them "
            f"failed: {error} Make them equal with `transforms`, such as a crop."
        ) from error
