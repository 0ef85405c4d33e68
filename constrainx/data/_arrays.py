"""Batches from arrays in memory, without Python work for each example."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import PyTree

from constrainx.data._batches import (
    Batches,
    add_mask,
    check_batch,
    check_integers,
    check_maskable,
    check_seed,
    check_step,
    count_examples,
    local_rows,
)
from constrainx.data._stopwatch import Stopwatch
from constrainx.data.transforms import Transform, Transforms, check_transforms, cut_rows
from constrainx.errors import ArgumentError, ArgumentTypeError

Augment: TypeAlias = Callable[[PyTree, np.random.Generator], PyTree]

# Different streams of random numbers for every seed.
_ORDER, _AUGMENT = 0, 1


def arrays(
    tree: PyTree,
    *,
    batch: int,
    seed: int = 0,
    shuffle: bool = True,
    augment: Augment | None = None,
    transforms: Sequence[Transform] = (),
) -> Batches:
    """Batches from arrays in memory.

    Position k of the endless stream is example π_e(k mod n) with e = ⌊k / n⌋, where π_e is a
    permutation that depends only on the seed and e. Batches straddle epochs, so that no
    example is dropped. A batch costs one indexing operation per array.

    Args:
        tree: a pytree of arrays, with examples along the first axis of each. They are moved to the
            host's memory once.
        batch: the size of the global batch. It may exceed the number of examples.
        seed: for the order, for ``augment`` and for ``transforms``.
        shuffle: whether each epoch has a new order, or always that of the arrays.
        augment: ``augment(batch, rng)`` returns a changed batch of the same size. Every process
            computes it on the global batch and keeps its own rows, so that the batch does not
            depend on the number of processes. `Batches.once` does not use it.
        transforms: applied to batches in turn, such as `cx.data.transforms.RandomCrop`. What
            becomes of an example depends on the seed, the example and the epoch, so that every
            process computes its own rows alone. `Batches.once` leaves out what is random.

    >>> import constrainx.data, numpy as np
    >>> data = constrainx.data.arrays({"x": np.arange(5)}, batch=2, shuffle=False)
    >>> batches = data.from_step(2)
    >>> print(next(batches)["x"], next(batches)["x"])
    [4 0] [1 2]
    """
    check_batch(batch)
    check_seed(seed)
    if augment is not None and not callable(augment):
        raise ArgumentTypeError(f"`augment` must be a function of (batch, rng), got {augment!r}.")
    changes = Transforms(check_transforms(transforms), seed)
    if augment is not None and changes:
        raise ArgumentError(
            "`augment` and `transforms` are two ways to change batches: pass one of them. A "
            "subclass of `cx.data.transforms.Transform` may do what `augment` does."
        )
    examples = count_examples(tree, of="the arrays")
    if examples == 0:
        raise ArgumentError(
            "the arrays must have at least one example, got 0 along the first axis."
        )
    tree = jax.tree.map(np.asarray, tree)
    if augment is None:
        check_integers(tree, of="the arrays")
    return _Arrays(
        batch=batch,
        examples=examples,
        tree=tree,
        seed=seed,
        shuffle=shuffle,
        augment=augment,
        transforms=changes,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Arrays(Batches):
    batch: int
    examples: int

    tree: PyTree[np.ndarray] = dataclasses.field(repr=False)
    seed: int
    shuffle: bool
    augment: Augment | None
    transforms: Transforms

    @property
    def is_cheap(self) -> bool:
        """Indexing is; transforms take time."""
        return not self.transforms

    def timed_by(self, watch: Stopwatch) -> Batches:
        augment = self.augment
        if augment is not None:
            augment = functools.partial(watch.time, "augment", augment)
        transforms = dataclasses.replace(self.transforms, watch=watch)
        return dataclasses.replace(self, augment=augment, transforms=transforms)

    def from_step(
        self, step: int, *, process: int = 0, processes: int = 1
    ) -> Iterator[PyTree[np.ndarray]]:
        check_step(step)
        return self._iterate(step, local_rows(process, processes=processes, batch=self.batch))

    def once(self, *, batch: int, process: int = 0, processes: int = 1) -> Iterator[dict[str, Any]]:
        check_maskable(self.tree)
        return self._iterate_once(batch, local_rows(process, processes=processes, batch=batch))

    def _iterate(self, step: int, rows: slice) -> Iterator[PyTree[np.ndarray]]:
        leaves, structure = jax.tree.flatten(self.tree)
        order = functools.lru_cache(maxsize=2)(self._permute)
        wanted = rows if self.augment is None else slice(0, self.batch)
        while True:
            first, last = (step * self.batch + row for row in (wanted.start, wanted.stop))
            start, stop = self.transforms.widen(first, last)
            index = self._find_examples(order, start, stop - start)
            # Not np.take, which copies all of an array that is not contiguous.
            batch = jax.tree.unflatten(structure, [leaf[index] for leaf in leaves])
            if self.augment is not None:
                batch = self._apply_augment(batch, step, rows)
            elif self.transforms:
                epochs = np.arange(start, stop) // self.examples
                batch = self.transforms.apply(batch, epochs=epochs, examples=index)
                batch = cut_rows(batch, slice(first - start, last - start))
            yield batch
            step += 1

    def _iterate_once(self, batch: int, rows: slice) -> Iterator[dict[str, Any]]:
        for start in range(0, self.examples, batch):
            positions = np.arange(start + rows.start, start + rows.stop)
            index = np.minimum(positions, self.examples - 1)
            taken = jax.tree.map(lambda leaf, index=index: leaf[index], self.tree)
            yield add_mask(self.transforms.apply_once(taken), positions < self.examples)

    def _permute(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.examples)
        return np.random.default_rng([self.seed, _ORDER, epoch]).permutation(self.examples)

    def _find_examples(
        self, order: Callable[[int], np.ndarray], start: int, count: int
    ) -> np.ndarray:
        epoch, first = divmod(start, self.examples)
        if first + count <= self.examples:
            return order(epoch)[first : first + count]
        pieces = []
        while count:
            pieces.append(order(epoch)[first : first + count])
            count -= len(pieces[-1])
            epoch, first = epoch + 1, 0
        return np.concatenate(pieces)

    def _apply_augment(self, batch: PyTree, step: int, rows: slice) -> PyTree[np.ndarray]:
        assert self.augment is not None
        changed = self.augment(batch, np.random.default_rng([self.seed, _AUGMENT, step]))
        count = count_examples(changed, of="what `augment` returns")
        if count != self.batch:
            raise ArgumentError(
                f"`augment` must return as many examples as it was given, {self.batch}, got "
                f"{count}."
            )
        return jax.tree.map(lambda leaf: leaf[rows], changed)
