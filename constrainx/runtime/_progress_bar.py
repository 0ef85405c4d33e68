"""A progress bar, or plain lines where there is no terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from constrainx.runtime._callback import Callback
from constrainx.runtime._metric_names import parse_constraint_metric


class Bar(Callback):
    """A progress bar on a terminal, and a plain line now and then elsewhere."""

    SHOWN: ClassVar[int] = 3
    SECONDS_BETWEEN_LINES: ClassVar[float] = 15.0

    def __init__(self, steps: int, *, title: str = "", console: Console | None = None):
        self._console = Console() if console is None else console
        self._steps, self._title = steps, " ".join(title.splitlines())
        self._bar: Progress | None = None
        self._task: Any = None
        self._last_line = 0.0
        self._evaluated = ""

    def on_start(self, trainer: Any, step: int) -> None:
        """Shows the bar, where there is a terminal."""
        if not self._console.is_terminal:
            return
        columns = (
            # Names of recipes and constraints may hold what looks like markup.
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(compact=True),
        )
        self._bar = Progress(*columns, console=self._console)
        self._bar.start()
        self._task = self._bar.add_task(
            self._title, total=self._steps, completed=step, figures="compiling"
        )

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Updates the bar with loss, violations and speed."""
        figures = _summarise(metrics, self.SHOWN)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=f"{figures}{self._evaluated}")
        elif time.monotonic() - self._last_line > self.SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            prefix = f"{self._title}: " if self._title else ""
            self._print(f"{prefix}step {step}/{self._steps}  {figures}", soft_wrap=True)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the first metric of the evaluation."""
        name, value = next(iter(metrics.items()), ("", math.nan))
        self._evaluated = f"  test {name} {value:.4g}" if name else ""

    def on_event(self, step: int, message: str) -> None:
        """Prints a line above the bar."""
        self._print(f"step {step}: {message}")

    def on_end(self, step: int, reason: str) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
            self._bar.stop()

    def _print(self, text: str, *, soft_wrap: bool = False) -> None:
        self._console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=soft_wrap)


def _summarise(metrics: Mapping[str, float], constraints: int) -> str:
    """As much as fits beside a bar: the loss, the first few violations, and the speed."""
    parts = [f"loss {metrics['loss']:.4g}"] if "loss" in metrics else []
    figures = {parse_constraint_metric(name): value for name, value in metrics.items()}
    violations = [
        f"{figure[0]} {value:.2g}"
        for figure, value in figures.items()
        if figure is not None and figure[1] == "violation"
    ]
    parts += violations[:constraints]
    if "steps_per_second" in metrics:
        parts.append(f"{metrics['steps_per_second']:.4g}/s")
    return "  ".join(parts)
