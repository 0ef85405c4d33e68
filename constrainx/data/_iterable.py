"""Batches from any iterable, to use the pipelines of other libraries."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from constrainx.data._batches import (
    Batches,
    add_mask,
    check_batch,
    check_step,
    count_examples,
    local_rows,
)
from constrainx.errors import ArgumentError, ArgumentTypeError, UserError


class DataEndedError(UserError, RuntimeError):
    """An iterable has fewer batches than there are steps to train."""


def from_iterable(make: Callable[[], Iterable[PyTree]], *, batch: int) -> Batches:
    """Batches from any iterable of global batches.

    To start at step s, every process draws s batches and discards them, because an iterable offers
    no other way. Prefer `arrays`, `tfds` or `from_function` where resuming must be fast.

    Args:
        make: returns a new iterable over the same global batches each time.
        batch: the number of examples in each of them.

    >>> import constrainx.data, itertools, numpy as np
    >>> data = constrainx.data.from_iterable(
    ...     lambda: ({"x": np.full(4, step)} for step in itertools.count()), batch=4
    ... )
    >>> print(next(data.from_step(7, process=1, processes=2))["x"])
    [7 7]
    """
    check_batch(batch)
    if not callable(make):
        raise ArgumentTypeError(
            f"`make` must be a function that returns a new iterable, got {type(make).__name__}. "
            "Write `lambda: iterable`, so that a run can start over when it resumes."
        )
    return _Iterated(make=make, batch=batch)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Iterated(Batches):
    make: Callable[[], Iterable[PyTree]]
    batch: int
    examples: None = None

    def from_step(
        self, step: int, *, process: int = 0, processes: int = 1
    ) -> Iterator[PyTree[np.ndarray]]:
        check_step(step)
        return self._iterate(step, local_rows(process, processes=processes, batch=self.batch))

    def once(self, *, batch: int, process: int = 0, processes: int = 1) -> Iterator[dict[str, Any]]:
        """One pass over the iterable, each of its batches filled up to ``batch`` examples."""
        return self._iterate_once(batch, local_rows(process, processes=processes, batch=batch))

    def _iterate(self, step: int, rows: slice) -> Iterator[PyTree[np.ndarray]]:
        with contextlib.ExitStack() as stack:
            number = -1
            for number, found in enumerate(self._open(stack)):
                if number < step:
                    continue
                count = count_examples(found, of="the batches of `make()`")
                if count != self.batch:
                    raise ArgumentError(
                        f"`batch` is {self.batch}, but `make()` yielded {count} examples at step "
                        f"{number}. Drop the remainder, or pass batch={count}."
                    )
                yield jax.tree.map(lambda leaf: np.asarray(leaf)[rows], found)
            raise DataEndedError(
                f"`make()` ended after {number + 1} batches, before step {max(number + 1, step)}. "
                "Return an endless iterable, such as one that starts over, or train for fewer "
                "steps."
            )

    def _iterate_once(self, batch: int, rows: slice) -> Iterator[dict[str, Any]]:
        with contextlib.ExitStack() as stack:
            for found in self._open(stack):
                count = count_examples(found, of="the batches of `make()`")
                if not 0 < count <= batch:
                    raise ArgumentError(
                        f"`once` fills batches up to `batch`, {batch}, and cannot hold the "
                        f"{count} examples that `make()` yielded. Pass batch={self.batch}."
                    )
                positions = np.arange(rows.start, rows.stop)
                index = np.minimum(positions, count - 1)
                taken = jax.tree.map(lambda leaf, index=index: np.asarray(leaf)[index], found)
                yield add_mask(taken, positions < count)

    def _open(self, stack: contextlib.ExitStack) -> Iterator[PyTree]:
        iterator = iter(self.make())
        if hasattr(iterator, "close"):
            stack.callback(iterator.close)
        return iterator
