"""One source of batches after the other."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import PyTree

from constrainx.data._batches import Batches, check_step
from constrainx.errors import ArgumentError, ArgumentTypeError


def in_turn(sources: Sequence[Batches], *, steps: int) -> Batches:
    """So many batches of each source, one source after the other, as in a sequence of tasks.

    The last source goes on without end.

    Args:
        sources: of batches of the same size.
        steps: how many batches each gives.

    >>> import constrainx.data, numpy as np
    >>> tasks = [constrainx.data.arrays({"x": np.full(4, k)}, batch=2) for k in (1, 2)]
    >>> batches = constrainx.data.in_turn(tasks, steps=2).from_step(1)
    >>> print(next(batches)["x"], next(batches)["x"])
    [1 1] [2 2]
    """
    sources = tuple(sources)
    if not sources or not all(isinstance(source, Batches) for source in sources):
        raise ArgumentTypeError(
            "`in_turn(sources=...)` must be batches, as `cx.data.arrays(...)` makes them, got "
            f"{sources!r}."
        )
    sizes = {source.batch for source in sources}
    if len(sizes) > 1:
        raise ArgumentError(
            f"the sources of `in_turn` must have batches of one size, got {sorted(sizes)}."
        )
    check_step(steps)
    if steps == 0:
        raise ArgumentError("`in_turn(steps=...)` must be at least 1, got 0.")
    counts = [source.examples for source in sources]
    known = [count for count in counts if count is not None]
    return _InTurn(
        batch=sizes.pop(),
        examples=sum(known) if len(known) == len(counts) else None,
        sources=sources,
        steps=int(steps),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _InTurn(Batches):
    batch: int
    examples: int | None
    sources: tuple[Batches, ...]
    steps: int

    @property
    def is_cheap(self) -> bool:
        return all(source.is_cheap for source in self.sources)

    def from_step(
        self, step: int, *, process: int = 0, processes: int = 1
    ) -> Iterator[PyTree[np.ndarray]]:
        check_step(step)
        return self._iterate(step, process, processes)

    def once(self, *, batch: int, process: int = 0, processes: int = 1) -> Iterator[dict[str, Any]]:
        for source in self.sources:
            yield from source.once(batch=batch, process=process, processes=processes)

    def _iterate(self, step: int, process: int, processes: int) -> Iterator[PyTree[np.ndarray]]:
        while True:
            turn = min(step // self.steps, len(self.sources) - 1)
            start = step - turn * self.steps
            is_last = turn == len(self.sources) - 1
            batches: Any = self.sources[turn].from_step(start, process=process, processes=processes)
            with contextlib.closing(batches):
                for batch in batches:
                    yield batch
                    step += 1
                    if not is_last and step == (turn + 1) * self.steps:
                        break
