"""Metrics and events as a file of JSON lines."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from constrainx.runtime._callback import Callback

log = logging.getLogger("constrainx")


class JsonLines(Callback):
    """Appends to ``metrics.jsonl``: one object per line, safe to read while the run goes on.

    On a full disk lines are lost and the run goes on; a checkpoint that fails is what ends it.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._start = time.time()

    def on_start(self, trainer: Any, step: int) -> None:
        """Removes a last line that a crash cut off, and zeros that a power cut left behind."""
        try:
            content = self._path.read_bytes() if self._path.exists() else b""
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                # The lines before are not written again, so nothing can be lost on the way.
                os.truncate(self._path, whole)
        except OSError as error:
            log.warning("%s could not be mended: %s", self._path, error)

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a line of kind "train"."""
        self._append(step, "train", metrics)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a line of kind "eval"."""
        self._append(step, "eval", metrics)

    def on_event(self, step: int, message: str) -> None:
        """Appends a line of kind "event"."""
        self._append(step, "event", {"message": message})

    def on_end(self, step: int, reason: str) -> None:
        """Appends the reason as an event."""
        self.on_event(step, reason)

    def _append(self, step: int, kind: str, content: Mapping[str, Any]) -> None:
        line = {"step": step, "time": round(time.time() - self._start, 3), "kind": kind, **content}
        try:
            with self._path.open("ab", buffering=0) as file:
                whole = file.tell()
                encoded = (json.dumps(line) + "\n").encode()
                if file.write(encoded) < len(encoded):
                    file.truncate(whole)
                    raise OSError(f"{self._path} could not be written in full")
        except OSError as error:
            log.warning("a line of metrics was lost: %s", error)
