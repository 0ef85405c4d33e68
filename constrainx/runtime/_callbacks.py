"""What listens to a training run: metric files, TensorBoard, the progress bar, and one's own."""

from __future__ import annotations

import json
import logging
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from constrainx.errors import MissingPackageError

log = logging.getLogger("constrainx")


class Callback:
    """Listens to a run: subclass it and write the methods that you need.

    Metrics are numbers by name. All methods are called on process 0 alone, outside of the compiled
    step, and see figures that were on their way to the log anyway.

    >>> class Loss(Callback):
    ...     def on_log(self, step, metrics):
    ...         print(step, round(metrics["loss"], 2))
    """

    def on_start(self, trainer: Any, step: int) -> None:
        """Before the first step of a run or of its continuation."""

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Every ``log_every`` steps: means over the steps since the last time."""

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """After each evaluation."""

    def on_save(self, step: int) -> None:
        """After a checkpoint was begun."""

    def on_event(self, step: int, message: str) -> None:
        """What else happened: resumed, skipped a step, could not save."""

    def on_end(self, step: int, reason: str) -> None:
        """At the end, whatever the reason."""


class JsonLines(Callback):
    """Appends to ``metrics.jsonl``: an object a line, safe to read while the run goes on.

    On a full disk lines are lost; whether the run ends is for the checkpoints to say.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._start = time.time()

    def on_start(self, trainer: Any, step: int) -> None:
        """Takes away a last line that a crash cut off."""
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            self._path.write_bytes(whole)

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of kind "train"."""
        self._append(step, "train", metrics)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line of kind "eval"."""
        self._append(step, "eval", metrics)

    def on_event(self, step: int, message: str) -> None:
        """A line of kind "event"."""
        self._append(step, "event", {"message": message})

    def on_end(self, step: int, reason: str) -> None:
        """The reason as an event."""
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
            log.warning("a line of metrics is lost: %s", error)


class TensorBoard(Callback):
    """Writes event files for TensorBoard."""

    def __init__(self, folder: pathlib.Path):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder))
        self._has_failed = False

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Scalars under "train"."""
        self._scalars("train", step, metrics)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Scalars under "eval"."""
        self._scalars("eval", step, metrics)
        self._try(self._writer.flush)

    def on_event(self, step: int, message: str) -> None:
        """Text."""
        self._try(self._writer.add_text, "events", message, step)

    def on_end(self, step: int, reason: str) -> None:
        """Closes the files."""
        self._try(self._writer.add_text, "events", reason, step)
        self._try(self._writer.close)

    def _scalars(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):  # it cannot show others, and complains of each
                self._try(self._writer.add_scalar, f"{group}/{name}", value, step)

    def _try(self, write: Callable[..., Any], *arguments: Any) -> None:
        """On a full disk the thread that writes dies, and its queue, once full, blocks for good."""
        if self._has_failed:
            return
        try:
            if not self._writer.file_writer.event_writer._worker.is_alive():
                raise OSError("its thread has ended")
            write(*arguments)
        except OSError as error:
            self._has_failed = True
            log.warning("TensorBoard gets no more events: %s", error)


class WeightsAndBiases(Callback):
    """Sends metrics to Weights & Biases: ``pip install 'constrainx[wandb]'``."""

    def __init__(self, **options: Any):
        try:
            import wandb
        except ImportError as error:
            raise MissingPackageError(
                "`WeightsAndBiases` needs the package wandb: pip install 'constrainx[wandb]'."
            ) from error
        self._wandb, self._options = wandb, options
        self._run: Any = None

    def on_start(self, trainer: Any, step: int) -> None:
        """Begins or continues a run there."""
        config = dict(getattr(trainer, "config", None) or {})
        self._run = self._wandb.init(**{"config": config, "resume": "allow", **self._options})

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Figures under "train"."""
        self._run.log({f"train/{name}": value for name, value in metrics.items()}, step=step)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Figures under "eval"."""
        self._run.log({f"eval/{name}": value for name, value in metrics.items()}, step=step)

    def on_end(self, step: int, reason: str) -> None:
        """Ends the run there."""
        self._run.summary["reason"] = reason
        self._run.finish()


class Bar(Callback):
    """A progress bar on a terminal, and a plain line now and then elsewhere."""

    SHOWN: ClassVar[int] = 3
    SECONDS_BETWEEN_LINES: ClassVar[float] = 15.0

    def __init__(self, steps: int, *, title: str = "", console: Console | None = None):
        self._console = Console() if console is None else console
        self._steps, self._title = steps, title
        self._bar: Progress | None = None
        self._task: Any = None
        self._last_line = 0.0
        self._evaluated = ""

    def on_start(self, trainer: Any, step: int) -> None:
        """Shows the bar."""
        if not self._console.is_terminal:
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
        )
        self._bar = Progress(*columns, console=self._console)
        self._bar.start()
        self._task = self._bar.add_task(
            self._title, total=self._steps, completed=step, figures="compiling"
        )

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Loss, violations and speed."""
        figures = _short(metrics, self.SHOWN)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=f"{figures}{self._evaluated}")
        elif time.monotonic() - self._last_line > self.SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            prefix = f"{self._title}: " if self._title else ""
            self._console.print(
                f"{prefix}step {step}/{self._steps}  {figures}", highlight=False, soft_wrap=True
            )

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """The first metric of the evaluation."""
        name, value = next(iter(metrics.items()), ("", math.nan))
        self._evaluated = f"  test {name} {value:.4g}" if name else ""

    def on_event(self, step: int, message: str) -> None:
        """A line above the bar."""
        self._console.print(f"step {step}: {message}", highlight=False)

    def on_end(self, step: int, reason: str) -> None:
        """Takes the bar down."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
            self._bar.stop()


def _short(metrics: Mapping[str, float], constraints: int) -> str:
    """What fits beside a bar."""
    parts = [f"loss {metrics['loss']:.4g}"] if "loss" in metrics else []
    violations = {
        name.split("/")[1]: value
        for name, value in metrics.items()
        if name.startswith("constraints/") and name.endswith("/violation")
    }
    parts += [f"{name} {value:.2g}" for name, value in list(violations.items())[:constraints]]
    if "steps_per_second" in metrics:
        parts.append(f"{metrics['steps_per_second']:.3g}/s")
    return "  ".join(parts)
