"""Being asked to stop: SIGTERM and Ctrl-C set a flag, and the loop saves before it leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils


class StopRequests:
    """What has been asked for so far."""

    def __init__(self) -> None:
        self._asked: str | None = None
        self._is_alone = jax.process_count() == 1

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler; a second Ctrl-C is not kept waiting."""
        del frame
        if self._asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = signal.Signals(number).name
        if not self._is_alone:
            # Were this process to leave by itself, the others would wait for it: JAX tells them.
            os.kill(os.getpid(), signal.SIGTERM)

    def at(self, step: int) -> str | None:
        """What asks to stop at this step, on all processes alike, or None; ask after each step."""
        if self._is_alone:
            return self._asked
        try:
            return "SIGTERM" if multihost_utils.reached_preemption_sync_point(step) else None
        except RuntimeError:  # the user has switched JAX's preemption service off
            return None


@contextlib.contextmanager
def listen_for_signals() -> Iterator[StopRequests]:
    """Listens to SIGTERM and SIGINT while the block runs.

    With several processes JAX itself listens to SIGTERM, so that all of them can agree on a step.
    Off the main thread, Python allows no handlers.
    """
    listener = StopRequests()
    if threading.current_thread() is not threading.main_thread():
        yield listener
        return
    numbers = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
    before = {number: signal.signal(number, listener) for number in numbers}
    try:
        yield listener
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
