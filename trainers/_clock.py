"""How long a trainer's steps take, before it trains: its compiled step, at several points."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from constrainx.trainers._loop import AHEAD
from constrainx.trainers._state import State
from constrainx.trainers._totals import Totals

# Constraints begin late or end early, so steps are timed at several points of a run.
PLACES = 4
LEAST_STEPS = 3


class StepClock:
    """Times the steps of a trainer as its loop takes them, data and all, and leaves it as it is.

    A run's steps need not all take equally long: a constraint may begin to act in the middle. So
    steps are timed at points that are spread evenly over the run, by setting what counts steps in
    the state. What does not come back is how the network changes: the iterations of a solver are
    those of a network at its start.
    """

    def __init__(
        self,
        state: State,
        *,
        take_step: Callable[[State, Totals, PyTree], tuple[State, Totals, jax.Array]],
        start_totals: Callable[[PyTree], Totals],
        batches: Callable[[], Any],
        place: Callable[[PyTree], PyTree],
        steps: int,
        every: Sequence[int] = (),
    ):
        """Compiles the step, takes it once, and finds what counts steps in the state.

        Args:
            state: before the first step. It is donated.
            take_step: the compiled step.
            start_totals: a batch on the devices ↦ the sums of all metrics, at zero.
            batches: reads this process's rows from the first step on.
            place: puts them on the devices.
            steps: how many the run has.
            every: from which step to the next constraints act.
        """
        self._take, self._read, self._place = take_step, batches, place
        self._places = [int((i + 0.5) / PLACES * steps) for i in range(PLACES)]
        self._least = max(LEAST_STEPS, *every, 0)
        self._batches = batches()
        before = _read_counters(state)
        batch = place(next(self._batches))
        self._totals = start_totals(batch)
        self._state, self._totals, _ = take_step(state, self._totals, batch)
        after = _read_counters(self._state)
        self._counts = [b == 0 and a == 1 for b, a in zip(before, after, strict=True)]

    def measure(self, *, seconds: float = 1.0) -> float:
        """The mean time of a step, in seconds, over all points of the run.

        Args:
            seconds: how long to take steps for; longer if steps are slow.
        """
        times = [self._measure_at(step, seconds / len(self._places)) for step in self._places]
        return float(np.mean(times))

    def close(self) -> None:
        """Stops reading data."""
        if hasattr(self._batches, "close"):
            self._batches.close()

    def _measure_at(self, step: int, seconds: float) -> float:
        self._state = self._set_counters(step)
        jax.block_until_ready(self._take_step())  # not timed: it may find other branches cold
        in_flight: collections.deque[jax.Array] = collections.deque()
        taken, start = 0, time.perf_counter()
        while taken < self._least or time.perf_counter() - start < seconds:
            in_flight.append(self._take_step())
            taken += 1
            if len(in_flight) > AHEAD:
                jax.block_until_ready(in_flight.popleft())
        jax.block_until_ready(self._state)
        return (time.perf_counter() - start) / taken

    def _take_step(self) -> jax.Array:
        batch = self._place(self._next_rows())
        self._state, self._totals, token = self._take(self._state, self._totals, batch)
        return token

    def _next_rows(self) -> PyTree:
        rows = next(self._batches, None)
        if rows is None:  # data that has an end
            self.close()
            self._batches = self._read()
            rows = next(self._batches)
        return rows

    def _set_counters(self, step: int) -> State:
        leaves, tree = jax.tree.flatten(self._state)
        replaced = [
            jax.device_put(jnp.asarray(step, leaf.dtype), leaf.sharding) if counts else leaf
            for leaf, counts in zip(leaves, self._counts, strict=True)
        ]
        return jax.tree.unflatten(tree, replaced)


def _read_counters(state: State) -> list[int | None]:
    """The values of whole numbers in a state, in the order of its leaves; None for other leaves."""
    return [
        int(leaf) if leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.integer) else None
        for leaf in jax.tree.leaves(state)
    ]
