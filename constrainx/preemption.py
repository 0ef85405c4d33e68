"""Being asked to stop: SIGTERM and Ctrl-C set a flag, and the loop saves before it leaves."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import jax


class Requests:
    """What has been asked for so far."""

    def __init__(self) -> None:
        self.stop: str | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler; a second Ctrl-C is not kept waiting."""
        del frame
        if self.stop is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stop = signal.Signals(number).name


@contextlib.contextmanager
def requests() -> Iterator[Requests]:
    """Listens to SIGTERM and SIGINT while the block runs.

    With several processes JAX itself listens to SIGTERM, so that all of them can agree on a step;
    see `Checkpoints.preempted`. Off the main thread, Python allows no handlers.
    """
    listener = Requests()
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
