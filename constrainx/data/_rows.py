"""One process's contiguous rows of the global batches of a Grain data set."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import grain
import jax
import numpy as np
from jaxtyping import Int, PyTree

from constrainx.data.transforms import Transforms, cut_rows
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
        self,
        examples: grain.MapDataset,
        *,
        batch: int,
        rows: slice,
        step: int,
        steps: int,
        change: Change | None,
    ) -> None:
        self._examples = examples
        self._batch = batch
        self._rows = rows
        self._step = step
        self._steps = steps
        self._last = len(examples) - 1
        self._change = change

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> PyTree[np.ndarray]:
        start = (self._step + index) * self._batch
        first, last = start + self._rows.start, start + self._rows.stop
        if self._change is None:
            return check_stacked(self._read(first, last))
        begin, end = self._change.widen(first, last)
        batch = self._change.apply(self._read(begin, end), np.arange(begin, end))
        return cut_rows(check_stacked(batch), slice(first - begin, last - begin))

    def _read(self, start: int, stop: int) -> Any:
        positions = range(start, stop)
        return _stack([self._examples[min(position, self._last)] for position in positions])


class Change(Protocol):
    """Changes whole batches; see `constrainx.data.transforms.Transforms`."""

    def widen(self, start: int, stop: int) -> tuple[int, int]:
        """The positions that are needed to make those from ``start`` to ``stop``."""
        ...

    def apply(self, batch: Any, positions: Int[np.ndarray, " batch"]) -> Any:
        """A changed batch, of the examples at these positions."""
        ...


@dataclasses.dataclass(frozen=True)
class ChangeForever:
    """The transforms of training, for examples that repeat.

    Attributes:
        transforms: what to apply.
        numbers: the number of the example at each position.
        examples: how many there are.
    """

    transforms: Transforms
    numbers: grain.MapDataset
    examples: int

    def widen(self, start: int, stop: int) -> tuple[int, int]:
        """As the transforms say."""
        return self.transforms.widen(start, stop)

    def apply(self, batch: Any, positions: Int[np.ndarray, " batch"]) -> Any:
        """With random numbers for each example and epoch."""
        numbers = np.array([self.numbers[int(position)] for position in positions], np.int64)
        return self.transforms.apply(batch, epochs=positions // self.examples, examples=numbers)


@dataclasses.dataclass(frozen=True)
class ChangeOnce:
    """The transforms of one pass, without randomness.

    Attributes:
        transforms: what to apply.
    """

    transforms: Transforms

    def widen(self, start: int, stop: int) -> tuple[int, int]:
        """No more than is asked for."""
        return start, stop

    def apply(self, batch: Any, positions: Int[np.ndarray, " batch"]) -> Any:
        """The same for every position."""
        del positions
        return self.transforms.apply_once(batch)


def batch_forever(
    examples: grain.MapDataset, *, batch: int, rows: slice, step: int, change: Change | None = None
) -> grain.MapDataset:
    """A process's rows of every batch from a step on, of examples that repeat."""
    steps = sys.maxsize // batch - step
    return grain.MapDataset.source(
        Rows(examples, batch=batch, rows=rows, step=step, steps=steps, change=change),
    )


def batch_once(
    examples: grain.MapDataset, *, batch: int, rows: slice, change: Change | None = None
) -> grain.MapDataset:
    """A process's rows of the batches of one pass, the last of which is filled up."""
    steps = -(-len(examples) // batch)
    return grain.MapDataset.source(
        Rows(examples, batch=batch, rows=rows, step=0, steps=steps, change=change)
    )


def _stack(examples: Sequence[Any]) -> Any:
    """A batch; entries whose shapes differ are lists, for a transform that makes them equal."""

    def stack(*leaves: Any) -> Any:
        if len({np.shape(leaf) for leaf in leaves}) > 1:
            return list(leaves)
        return np.stack(leaves)

    try:
        return jax.tree.map(stack, *examples)
    except ValueError as error:
        raise ArgumentError(
            "the examples of a batch must have the same entries, and stacking them failed: "
            f"{error} Make them equal with `transforms`."
        ) from error


def check_stacked(batch: Any) -> PyTree[np.ndarray]:
    """The batch, if the shapes of its examples agree."""
    found = jax.tree_util.tree_leaves_with_path(batch, is_leaf=lambda x: isinstance(x, list))
    for path, leaf in found:
        if isinstance(leaf, list):
            shapes = sorted({np.shape(one) for one in leaf})
            raise ArgumentError(
                "the examples of a batch must have the same shapes, but "
                f"{jax.tree_util.keystr(path)} has {' and '.join(map(str, shapes[:2]))}. Make them "
                "equal with `transforms`, such as `cx.data.transforms.RandomResizedCrop`."
            )
    return batch
