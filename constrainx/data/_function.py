"""Batches that a function draws at each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import PyTree

from constrainx.data._batches import (
    Batches,
    check_batch,
    check_seed,
    check_step,
    count_examples,
    local_rows,
)
from constrainx.errors import ArgumentError, ArgumentTypeError

Draw: TypeAlias = Callable[[np.random.Generator, int], PyTree]


def from_function(function: Draw, *, batch: int, seed: int = 0) -> Batches:
    """Batches that a function draws at each step.

    Every process draws the global batch and keeps its rows, so that batches do not depend on the
    number of processes.

    Args:
        function: ``function(rng, count)`` returns a pytree of arrays with ``count`` examples. It
            must draw only from ``rng``, which is a function of the seed and the step.
        batch: the size of the global batch.
        seed: determines all batches.

    >>> import constrainx.data
    >>> data = constrainx.data.from_function(lambda rng, n: {"x": rng.normal(size=(n, 3))}, batch=4)
    >>> next(data.from_step(1000))["x"].shape
    (4, 3)
    """
    check_batch(batch)
    check_seed(seed)
    if not callable(function):
        raise ArgumentTypeError(f"`function` must be a function of (rng, count), got {function!r}.")
    return _Drawn(function=function, batch=batch, seed=seed)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Drawn(Batches):
    function: Draw
    batch: int
    seed: int
    examples: None = None

    def from_step(
        self, step: int, *, process: int = 0, processes: int = 1
    ) -> Iterator[PyTree[np.ndarray]]:
        check_step(step)
        return self._iterate(step, local_rows(process, processes=processes, batch=self.batch))

    def once(self, *, batch: int, process: int = 0, processes: int = 1) -> Iterator[dict[str, Any]]:
        del batch, process, processes
        raise ArgumentTypeError(
            "`once` needs data with an end, and a function draws forever. For evaluation, draw a "
            "fixed set: cx.data.arrays(function(np.random.default_rng(1), 1000), batch=...)."
        )

    def _iterate(self, step: int, rows: slice) -> Iterator[PyTree[np.ndarray]]:
        while True:
            drawn = self.function(np.random.default_rng([self.seed, step]), self.batch)
            count = count_examples(drawn, of="what `function` returns")
            if count != self.batch:
                raise ArgumentError(
                    f"`function` was asked for {self.batch} examples and returned {count}: make "
                    "the first axis of every array as long as its second argument says."
                )
            yield jax.tree.map(lambda leaf: np.asarray(leaf)[rows], drawn)
            step += 1
