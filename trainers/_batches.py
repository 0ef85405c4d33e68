"""Reads batches ahead, in such a way that a signal is handled even while data has stalled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from constrainx.data import Prefetched, prefetch

# Seconds waited so far ↦ whether to wait no longer.
GiveUp: TypeAlias = Callable[[float], bool]


def read_ahead(batches: Any, *, is_cheap: bool) -> Any:
    """Prepares batches in a background thread, unless the thread would cost more than they do."""
    return batches if is_cheap else prefetch(batches)


def wait_for(batches: Any, give_up: GiveUp) -> bool:
    """Waits for the next of the batches from `read_ahead`; returns whether it is there."""
    return batches.wait(unless=give_up) if isinstance(batches, Prefetched) else True
