"""The first thing that a newcomer runs: the inertia recipe, with progress, a table and a plot."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import matplotlib
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from constrainx.recipes import o3_inertia

Histories = dict[str, list[o3_inertia.Progress]]


def run(*, epochs: int, out: pathlib.Path) -> Histories:
    """Trains all methods, prints the table and writes the plot."""
    if epochs < 1:
        raise SystemExit(f"--epochs must be at least 1, got {epochs}.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--out {out} cannot be written to: {error.strerror}.") from error
    console = Console()
    settings = o3_inertia.Settings(epochs=epochs)
    console.print("Moment of inertia of five particles. Does the network turn with them?")
    histories = _train(settings, console)
    console.print(_table(histories, settings))
    _plot(histories, out / "o3-inertia.png")
    figures = {
        "settings": dataclasses.asdict(settings),
        "results": {
            name: [dataclasses.asdict(p) for p in history] for name, history in histories.items()
        },
    }
    (out / "o3-inertia.json").write_text(json.dumps(figures, indent=1))
    console.print(f"Plot: {out / 'o3-inertia.png'}   Figures: {out / 'o3-inertia.json'}")
    console.print("Next: recipes/o3_inertia.py is all there is to it. Change a constraint there.")
    return histories


def _train(settings: o3_inertia.Settings, console: Console) -> Histories:
    histories: Histories = {}
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console) as progress:
        for method in o3_inertia.METHODS:
            task = progress.add_task(method, total=settings.epochs, figures="compiling")
            histories[method] = []
            for report in o3_inertia.train(method, settings):
                histories[method].append(report)
                figures = f"error {report.error:.3f}  violation {report.violation:.3f}"
                progress.update(task, completed=report.epoch, figures=figures)
                if not console.is_terminal and report.epoch % 25 == 0:
                    console.print(f"{method}: epoch {report.epoch}  {figures}")
    return histories


def _table(histories: Histories, settings: o3_inertia.Settings) -> Table:
    table = Table(
        title=f"After {settings.epochs} epochs, seed {settings.seed}", title_justify="left"
    )
    table.add_column("method")
    for heading in ("test error", "violation", "training time"):
        table.add_column(heading, justify="right")
    for method, history in histories.items():
        last = history[-1]
        table.add_row(method, f"{last.error:.3f}", f"{last.violation:.3f}", f"{last.seconds:.0f} s")
    return table


def _plot(histories: Histories, path: pathlib.Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for method, history in histories.items():
        epochs = [report.epoch for report in history]
        axes[0].plot(epochs, [report.error for report in history], label=method)
        axes[1].plot(epochs, [report.violation for report in history], label=method)
    axes[0].set_title("mean squared error, test set")
    axes[1].set_title("violation, mean of ‖f(Rr) − R f(r) Rᵀ‖²")
    for axis in axes:
        axis.set_yscale("log")
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.3, which="both")
    axes[0].legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
