"""SIGTERM and Ctrl-C set a flag, so that the loop can save before it stops."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import jax
from jax.experimental import multihost_utils

# Set when the process that supervises this one has passed a SIGTERM on. With several processes JAX
# handles the signal itself, and Python does not see it.
PASSED_ON = threading.Event()


class StopRequests:
    """The signals received so far."""

    def __init__(self) -> None:
        self._asked: str | None = None
        self._is_alone = jax.process_count() == 1

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal. A second Ctrl-C interrupts at once."""
        del frame
        if self._asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = signal.Signals(number).name
        if not self._is_alone:
            # JAX passes SIGTERM on to the other processes, which would wait for this one forever.
            os.kill(os.getpid(), signal.SIGTERM)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process to agree with."""
        return self._is_alone

    @property
    def asked(self) -> str | None:
        """The signal that this process has received, if any."""
        if self._asked is None and not self._is_alone and PASSED_ON.is_set():
            return "SIGTERM"
        return self._asked

    def at(self, step: int) -> str | None:
        """The signal that stops the run at this step, the same on all processes, or None.

        Call it after each step.
        """
        if self._is_alone:
            return self._asked
        try:
            return "SIGTERM" if multihost_utils.reached_preemption_sync_point(step) else None
        except RuntimeError:  # the user has switched JAX's preemption service off
            return None


def end_program(name: str, *, is_saved: bool) -> NoReturn:
    """Ends the program as a signal asks for, after the run has stopped in good order.

    Args:
        name: of the signal.
        is_saved: whether the run can continue, so that nothing went wrong.
    """
    if name == "SIGINT":
        raise KeyboardInterrupt
    raise SystemExit(0 if is_saved else 128 + signal.Signals[name])


@contextlib.contextmanager
def listen_for_signals() -> Iterator[StopRequests]:
    """Listens for SIGTERM and SIGINT while the block runs.

    With several processes JAX itself handles SIGTERM, so that all of them can agree on a step.
    Outside the main thread Python allows no handlers, and nothing is listened for.
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
