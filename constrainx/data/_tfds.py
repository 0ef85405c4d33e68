"""Batches from data sets in the layout of TensorFlow Datasets, read by Grain."""

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
    add_mask,
    check_batch,
    check_seed,
    check_step,
    local_rows,
)
from constrainx.data._rows import ChangeForever, ChangeOnce, batch_forever, batch_once
from constrainx.data._source import open_source
from constrainx.data._stopwatch import Stopwatch
from constrainx.data._timed import TimedSource, time_transforms
from constrainx.data.transforms import Transform, Transforms
from constrainx.errors import ArgumentError, ArgumentTypeError

ExampleTransform: TypeAlias = (
    grain.transforms.Map | grain.transforms.RandomMap | Callable[[Any], Any]
)

_THREADS = 4


def tfds(
    name: str,
    split: str,
    *,
    batch: int,
    seed: int = 0,
    shuffle: bool = True,
    transforms: Sequence[ExampleTransform | Transform] = (),
    workers: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
    buffer: int = 4,
) -> Batches:
    """Batches from a prepared data set, without TensorFlow.

    Examples are read by random access, so that starting at a late step costs no more than starting
    at zero. Each of the ``workers`` imports the calling script, which then needs the usual
    ``if __name__ == "__main__":``.

    Args:
        name: as TFDS spells it, such as ``"cifar10"`` or ``"name/config:1.0.0"``.
        split: as TFDS spells it, such as ``"train"`` or ``"train[:80%]"``.
        batch: the size of the global batch.
        seed: for the order and for random transforms.
        shuffle: whether each epoch has a new order, or always that of the files.
        transforms: applied to each example in turn: functions of an example, `grain.transforms.Map`
            or `grain.transforms.RandomMap`. A random one gets a generator that is a function of the
            seed and the position; `Batches.once` leaves it out. Use transforms to drop strings,
            which no device can hold. After these, transforms of whole batches, such as
            `cx.data.transforms.RandomCrop`, whose random numbers depend on the seed, the example
            and the epoch.
        workers: the number of processes that read and transform; 0 uses threads of this process.
        data_dir: where the data sets are; by default the environment variable ``TFDS_DATA_DIR``, or
            else ``~/tensorflow_datasets``.
        buffer: the number of batches to keep ready, in each worker if there are any; 0 reads on
            demand, without threads.

    Raises:
        DataNotFoundError: if the data set has not been prepared.
        DamagedDataError: if its files are incomplete. A damaged example is found when it is read.
    """
    check_batch(batch)
    check_seed(seed)
    for argument, value in (("workers", workers), ("buffer", buffer)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ArgumentError(f"`{argument}` must be a whole number, 0 or more, got {value!r}.")
    of_examples, of_batches = _split_transforms(transforms)
    examples = open_source(name, split, data_dir)
    if len(examples) == 0:
        raise ArgumentError(f"`split` {split!r} of {name} has no examples.")
    return _TFDS(
        name=name,
        split=split,
        batch=batch,
        examples=len(examples),
        seed=seed,
        shuffle=shuffle,
        transforms=of_examples,
        changes=Transforms(of_batches, seed),
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
    transforms: tuple[ExampleTransform, ...]
    changes: Transforms
    workers: int
    buffer: int
    source: Any = dataclasses.field(repr=False)

    def timed_by(self, watch: Stopwatch) -> Batches:
        # Other processes have clocks of their own, and times of threads do not add up.
        return dataclasses.replace(
            self,
            source=TimedSource(self.source, watch),
            transforms=time_transforms(self.transforms, watch),
            changes=dataclasses.replace(self.changes, watch=watch),
            workers=0,
            buffer=0,
        )

    def from_step(
        self, step: int, *, process: int = 0, processes: int = 1
    ) -> Iterator[PyTree[np.ndarray]]:
        check_step(step)
        rows = local_rows(process, processes=processes, batch=self.batch)
        # Transforms come after `repeat`, so that random ones see the position in the endless
        # stream and differ from epoch to epoch.
        examples = _apply_transforms(self._repeat(self.source), self.transforms)
        change = None
        if self.changes:
            # In the same order, since that depends on nothing but the seed and the length.
            numbers = self._repeat(range(self.examples))
            change = ChangeForever(self.changes, numbers, self.examples)
        return self._read(
            batch_forever(examples, batch=self.batch, rows=rows, step=step, change=change)
        )

    def once(self, *, batch: int, process: int = 0, processes: int = 1) -> Iterator[dict[str, Any]]:
        rows = local_rows(process, processes=processes, batch=batch)
        kept = [one for one in self.transforms if not isinstance(one, grain.transforms.RandomMap)]
        examples = _apply_transforms(grain.MapDataset.source(self.source), kept)
        change = ChangeOnce(self.changes) if self.changes else None
        batches = batch_once(examples, batch=batch, rows=rows, change=change)
        return self._iterate_once(batches, batch, rows)

    def _repeat(self, source: Any) -> grain.MapDataset:
        """The endless stream of examples in its order."""
        examples = grain.MapDataset.source(source).seed(self.seed)
        return (examples.shuffle() if self.shuffle else examples).repeat()

    def _iterate_once(
        self, batches: grain.MapDataset, batch: int, rows: slice
    ) -> Iterator[dict[str, Any]]:
        with contextlib.closing(self._read(batches)) as iterator:
            for number, found in enumerate(iterator):
                positions = number * batch + np.arange(rows.start, rows.stop)
                yield add_mask(found, positions < self.examples)

    def _read(self, batches: grain.MapDataset) -> grain.DatasetIterator:
        # Elements are whole batches here, and Grain's default of 500 would fill the memory.
        options = grain.ReadOptions(
            num_threads=min(_THREADS, self.buffer), prefetch_buffer_size=self.buffer
        )
        reading = batches.to_iter_dataset(options)
        if self.workers:
            # Grain reads its flags when it starts a worker, which fails outside `absl.app.run`.
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()
            reading = reading.mp_prefetch(grain.MultiprocessingOptions(num_workers=self.workers))
        return iter(reading)


def _split_transforms(
    transforms: Sequence[Any],
) -> tuple[tuple[ExampleTransform, ...], tuple[Transform, ...]]:
    """The transforms of examples, and those of batches, which come after them."""
    of_batches = [transform for transform in transforms if isinstance(transform, Transform)]
    of_examples = list(transforms)[: len(transforms) - len(of_batches)]
    for transform in of_examples:
        if isinstance(transform, Transform):
            raise ArgumentError(
                f"`transforms` of batches must come last, but after {transform!r} there is one of "
                "single examples. Exchange them."
            )
        _check_transform(transform)
    return tuple(of_examples), tuple(of_batches)


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
            "`transforms` must be functions of an example, instances of grain.transforms.Map or "
            "grain.transforms.RandomMap, or transforms of batches, such as "
            f"`cx.data.transforms.RandomFlip()`, got {transform!r}."
        )


def _apply_transforms(
    examples: grain.MapDataset, transforms: Sequence[ExampleTransform]
) -> grain.MapDataset:
    for transform in transforms:
        if isinstance(transform, grain.transforms.RandomMap):
            examples = examples.random_map(transform)
        else:
            examples = examples.map(transform)
    return examples
