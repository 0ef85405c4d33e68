"""Batches out of any iterable, the way in for pipelines of other libraries."""

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
    check_batch,
    check_step,
    count_of,
    masked,
    rows_of,
)
from constrainx.errors import ArgumentError, ArgumentTypeError


def from_iterable(make: Callable[[], Iterable[PyTree]], *, batch: int) -> Batches:
    """Batches out of any iterable of global batches.

    Starting at step s draws s batches and throws them away, on every process: nothing else can be
    done with an iterable. Prefer `arrays`, `tfds` or `from_function` where resuming must be fast.

    Args:
        make: returns a fresh iterable of global batches, the same ones each time.
        batch: how many examples each of them has.

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
            f"`make` must be a function that returns a fresh iterable, got {type(make).__name__}. "
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
        return self._from(step, rows_of(process, processes=processes, batch=self.batch))

    def once(self, *, batch: int, process: int = 0, processes: int = 1) -> Iterator[dict[str, Any]]:
        """One pass over the iterable, each of its batches filled up to ``batch`` examples."""
        return self._pass(batch, rows_of(process, processes=processes, batch=batch))

    def _from(self, step: int, rows: slice) -> Iterator[PyTree[np.ndarray]]:
        with contextlib.ExitStack() as stack:
            number = -1
            for number, found in enumerate(self._made(stack)):
                if number < step:
                    continue
                count = count_of(found, of="the batches of `make()`")
                if count != self.batch:
                    raise ArgumentError(
                        f"`batch` is {self.batch}, but `make()` yielded {count} examples at step "
                        f"{number}. Drop the remainder, or pass batch={count}."
                    )
                yield jax.tree.map(lambda leaf: np.asarray(leaf)[rows], found)
            raise RuntimeError(
                f"`make()` ran out after {number + 1} batches, and step {max(number + 1, step)} "
                "was asked for. Return an iterable without end, such as one that starts over, or "
                "train for fewer steps."
            )

    def _pass(self, batch: int, rows: slice) -> Iterator[dict[str, Any]]:
        with contextlib.ExitStack() as stack:
            for found in self._made(stack):
                count = count_of(found, of="the batches of `make()`")
                if not 0 < count <= batch:
                    raise ArgumentError(
                        f"`once` fills batches up to `batch`, {batch}, and cannot hold the "
                        f"{count} examples that `make()` yielded. Pass batch={self.batch}."
                    )
                positions = np.arange(rows.start, rows.stop)
                index = np.minimum(positions, count - 1)
                taken = jax.tree.map(lambda leaf, index=index: np.asarray(leaf)[index], found)
                yield masked(taken, positions < count)

    def _made(self, stack: contextlib.ExitStack) -> Iterator[PyTree]:
        iterator = iter(self.make())
        if hasattr(iterator, "close"):
            stack.callback(iterator.close)
        return iterator
