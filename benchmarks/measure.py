"""Wall time and memory of compiled functions, measured so that contestants meet equal noise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


class Clock:
    """Seconds, by the wall or by the processor."""

    def __init__(self) -> None:
        self.counts_processor = False

    def __call__(self) -> float:
        """Seconds since some moment."""
        return time.process_time() if self.counts_processor else time.perf_counter()


# By the processor with `--processor-time`, which is the fairer one where a core is shared.
clock = Clock()


def compile_for(function: Callable, *args: Any) -> jax.stages.Compiled:
    """The function compiled for arguments like these."""
    return jax.jit(function).lower(*args).compile()


def best_times(
    contestants: Mapping[str, Callable[..., Any]], *args: Any, rounds: int
) -> dict[str, float]:
    """Seconds of the fastest of several calls, for each contestant.

    The contestants take turns, so that a busy spell of the machine hits all of them. One call each
    goes ahead unmeasured.

    Args:
        contestants: compiled functions.
        *args: what each of them is called with.
        rounds: how many calls to measure.

    Returns:
        A dictionary with the keys of ``contestants``.
    """
    for function in contestants.values():
        jax.block_until_ready(function(*args))
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds):
        for name, function in contestants.items():
            start = clock()
            # Not kept: the next contestant should find the memory free.
            jax.block_until_ready(function(*args))
            best[name] = min(best[name], clock() - start)
    return best


def temporary_bytes(function: jax.stages.Compiled) -> int:
    """The peak memory of a call besides its arguments and results, as XLA has planned it."""
    return _analyse(function).temp_size_in_bytes


def count_bytes(function: jax.stages.Compiled) -> int:
    """The memory of a call with its arguments and results, as XLA has planned it."""
    found = _analyse(function)
    shared = found.alias_size_in_bytes  # an argument that becomes a result
    ends = found.argument_size_in_bytes + found.output_size_in_bytes - shared
    return ends + found.temp_size_in_bytes


def _analyse(function: jax.stages.Compiled) -> Any:
    analysis = function.memory_analysis()
    if analysis is None:
        raise RuntimeError(f"the backend {jax.default_backend()!r} does not report its memory")
    return analysis
