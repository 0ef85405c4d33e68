"""Callbacks: objects that listen to a training run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Callback:
    """Listens to a run: subclass it and write the methods that you need.

    Metrics are numbers by name. Methods are called on process 0 alone, outside of the compiled
    step, with figures that were logged anyway: listening costs the device nothing.

    >>> class Loss(Callback):
    ...     def on_log(self, step, metrics):
    ...         print(step, round(metrics["loss"], 2))
    """

    def on_start(self, trainer: Any, step: int) -> None:
        """Called before the first step of a run, or of its continuation."""

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called every ``log_every`` steps, with means over the steps since the last call."""

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation."""

    def on_save(self, step: int) -> None:
        """Called when the writing of a checkpoint has started."""

    def on_event(self, step: int, message: str) -> None:
        """Called for everything else: the run resumed, skipped a step, could not save."""

    def on_end(self, step: int, reason: str) -> None:
        """Called at the end of the run, whatever the reason."""
