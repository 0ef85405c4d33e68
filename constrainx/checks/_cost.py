"""What constraints cost, compared with the loss: measured time, and operations that XLA counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

ROUNDS = 10


class Cost(NamedTuple):
    """What a compiled function costs.

    Attributes:
        seconds: of the fastest of ten runs, after compilation; other work on the machine only adds.
        operations: floating-point operations as XLA counts them, without those in loops whose
            length it does not know; None if it does not say.
    """

    seconds: float
    operations: float | None


def measure_cost(function: Callable[..., Any], *arguments: Any) -> Cost:
    """Compiles a function and runs it a few times."""
    compiled = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - start)
    analysis = compiled.cost_analysis()
    operations = analysis.get("flops") if isinstance(analysis, dict) else None
    return Cost(min(times), operations)
