"""Batches out of data sets in the layout of TensorFlow Datasets, read by Grain."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import grain
import numpy as np
from absl import flags
from jaxtyping import PyTree

from constrainx.data._batches import (
    Batches,
    check_batch,
    check_seed,
    check_step,
    masked,
    rows_of,
)
from constrainx.data._rows import batch_forever, batch_once
from constrainx.data._source import source
from constrainx.errors import ArgumentError, ArgumentTypeError

Transform: TypeAlias = grain.transforms.Map | grain.transforms.RandomMap | Callable[[Any], Any]

_THREADS = 4


def tfds(
    name: str,
    split: str,
    *,
    batch: int,
    seed: int = 0,
    shuffle: bool = True,
    transforms: Sequence[Transform] = (),
    workers: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
    buffer: int = 4,
) -> Batches:
    """Batches out of a prepared data set. TensorFlow is neither needed nor imported.

    Examples are read by random access: starting at a late step costs no more than starting at zero.
    With ``workers`` above zero the calling script is imported by each worker and needs the usual
    ``if __name__ == "__main__":``.

    Args:
        name: as TFDS spells it, such as ``"cifar10"`` or ``"name/config:1.0.0"``.
        split: as TFDS spells it, such as ``"train"`` or ``"train[:80%]"``.
        batch: the size of the global batch.
        seed: of the order and of random transforms.
        shuffle: a new order each epoch; otherwise always that of the files.
        transforms: applied to each example in turn: functions of an example, `grain.transforms.Map`
            or `grain.transforms.RandomMap`. Random ones get a generator which is a function of the
            seed and of the position, and are left out by `Batches.once`. Use them to drop texts
            and identifiers, which no device takes.
        workers: processes that read and transform; 0 does it in threads of this one.
        data_dir: where data sets are; by default the environment variable ``TFDS_DATA_DIR``, or
            else ``~/tensorflow_datasets``.
        buffer: how many batches to keep ready, in each worker if there are any; 0 reads only when
            asked, without threads.

    Raises:
        DataNotFoundError: if the data set has not been prepared.
    """
    check_batch(batch)
    check_seed(seed)
    for argument, value in (("workers", workers), ("buffer", buffer)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ArgumentError(f"`{argument}` must be a whole number, 0 or more, got {value!r}.")
    for transform in transforms:
        _check_transform(transform)
    examples = source(name, split, data_dir)
    if len(examples) == 0:
        raise ArgumentError(f"`split` {split!r} of {name} has no examples.")
    return _TFDS(
        name=name,
        split=split,
        batch=batch,
        examples=len(examples),
        seed=seed,
        shuffle=shuffle,
        transforms=tuple(transforms),
        workers=workers,
        buffer=buffer,
        source=examples,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _TFDS(Batches):
    name: str
    split: str
    batch: int
    examples: int
    seed: int
    shuffle: bool
    transforms: tuple[Transform, ...]
    workers: int
    buffer: int
    source: Any = dataclasses.field(repr=False)

    def from_step(
        self, step: int, *, process: int = 0, processes: int = 1
    ) -> Iterator[PyTree[np.ndarray]]:
        check_step(step)
        rows = rows_of(process, processes=processes, batch=self.batch)
        examples = grain.MapDataset.source(self.source).seed(self.seed)
        if self.shuffle:
            examples = examples.shuffle()
        # Transforms come after `repeat`, so that random ones see the position in the endless
        # stream and differ from epoch to epoch.
        examples = _transformed(examples.repeat(), self.transforms)
        return self._read(batch_forever(examples, batch=self.batch, rows=rows, step=step))

    def once(self, *, batch: int, process: int = 0, processes: int = 1) -> Iterator[dict[str, Any]]:
        rows = rows_of(process, processes=processes, batch=batch)
        kept = [one for one in self.transforms if not isinstance(one, grain.transforms.RandomMap)]
        examples = _transformed(grain.MapDataset.source(self.source), kept)
        return self._masked(batch_once(examples, batch=batch, rows=rows), batch, rows)

    def _masked(
        self, batches: grain.MapDataset, batch: int, rows: slice
    ) -> Iterator[dict[str, Any]]:
        with contextlib.closing(self._read(batches)) as iterator:
            for number, found in enumerate(iterator):
                positions = number * batch + np.arange(rows.start, rows.stop)
                yield masked(found, positions < self.examples)

    def _read(self, batches: grain.MapDataset) -> grain.DatasetIterator:
        # Grain counts elements, and those of `batches` are whole batches: its default of 500 would
        # fill the memory.
        options = grain.ReadOptions(
            num_threads=min(_THREADS, self.buffer), prefetch_buffer_size=self.buffer
        )
        reading = batches.to_iter_dataset(options)
        if self.workers:
            # Grain reads its own flags to start a worker, which fails outside `absl.app.run`.
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()
            reading = reading.mp_prefetch(grain.MultiprocessingOptions(num_workers=self.workers))
        return iter(reading)


def _check_transform(transform: Any) -> None:
    if isinstance(transform, grain.transforms.Map | grain.transforms.RandomMap):
        return
    if isinstance(transform, grain.transforms.Filter):
        raise ArgumentTypeError(
            f"`transforms` must keep every example, got the filter {transform!r}: batches would "
            "no longer be a function of the step. Filter when the data set is prepared."
        )
    if isinstance(transform, type) or not callable(transform):
        raise ArgumentTypeError(
            "`transforms` must be functions of an example, or instances of grain.transforms.Map "
            f"or grain.transforms.RandomMap, got {transform!r}."
        )


def _transformed(examples: grain.MapDataset, transforms: Sequence[Transform]) -> grain.MapDataset:
    for transform in transforms:
        if isinstance(transform, grain.transforms.RandomMap):
            examples = examples.random_map(transform)
        else:
            examples = examples.map(transform)
    return examples
