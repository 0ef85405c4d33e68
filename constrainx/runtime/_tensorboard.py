"""Event files for TensorBoard."""

from __future__ import annotations

import logging
import math
import pathlib
import threading
from collections.abc import Mapping
from typing import Any

from constrainx.runtime._callback import Callback

log = logging.getLogger("constrainx")


class TensorBoard(Callback):
    """Writes event files for TensorBoard."""

    def __init__(self, folder: pathlib.Path):
        self._has_failed = False
        self._writer: Any = None
        self._threads: list[threading.Thread] = []
        try:
            self._writer, self._threads = start_writer(folder)
        except OSError as error:
            self._give_up(error)

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes scalars under "train"."""
        self._write_scalars("train", step, metrics)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes scalars under "eval"."""
        self._write_scalars("eval", step, metrics)
        self._try("flush")

    def on_event(self, step: int, message: str) -> None:
        """Writes text."""
        self._try("add_text", "events", message, step)

    def on_end(self, step: int, reason: str) -> None:
        """Writes the reason and closes the files."""
        self._try("add_text", "events", reason, step)
        self._try("close")

    def _write_scalars(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):  # TensorBoard cannot show others, and warns of each
                self._try("add_scalar", f"{group}/{name}", value, step)

    def _try(self, method: str, *arguments: Any) -> None:
        """Calls a method of the writer, while its thread lives.

        On a full disk that thread dies, and once its queue is full, writing would block forever.
        """
        if self._has_failed:
            return
        try:
            if not all(thread.is_alive() for thread in self._threads):
                raise OSError("the thread that writes them has ended")
            getattr(self._writer, method)(*arguments)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._has_failed = True
        log.warning("TensorBoard gets no more events: %s", error)


def start_writer(folder: pathlib.Path) -> tuple[Any, list[threading.Thread]]:
    """A writer of event files, and the threads in which it writes.

    tensorboardX has no public way to ask whether its thread has died. A version that writes without
    one would leave the list empty, and then writing is tried as long as it raises nothing.
    """
    from tensorboardX import SummaryWriter

    before = set(threading.enumerate())
    writer = SummaryWriter(str(folder))
    started = set(threading.enumerate()) - before
    # Other parts of the program may have started threads of their own meanwhile.
    return writer, [one for one in started if type(one).__module__.startswith("tensorboardX")]
