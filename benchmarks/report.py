"""Tables, goals and plots of a benchmark: printed, and written as JSON, Markdown and PNG."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import matplotlib
import rich.console
import rich.table
from matplotlib.figure import Figure

import constrainx as cx

Cell: TypeAlias = str | int | float
WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of numbers, and how to write each column.

    Attributes:
        title: what is measured, with its unit.
        columns: names of the columns, each with a format such as ``".1f"``.
        rows: one cell a column.
    """

    title: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[Cell]]

    def write_cells(self) -> list[list[str]]:
        """The rows as they are printed."""
        return [
            [
                cell if isinstance(cell, str) else _format_number(cell, form)
                for cell, form in zip(row, self.columns.values(), strict=True)
            ]
            for row in self.rows
        ]

    def markdown(self) -> str:
        """The table in Markdown."""
        names = list(self.columns)
        lines = [names, ["---:"] * len(names), *self.write_cells()]
        rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"**{self.title}**\n\n{rows}"


@dataclasses.dataclass(frozen=True)
class Goal:
    """What was wanted, what came out, and whether that is enough."""

    wanted: str
    measured: str
    met: bool

    def sentence(self) -> str:
        """The goal in one line."""
        verdict = "met" if self.met else "missed"
        return f"Goal {verdict}: {self.wanted}. Measured: {self.measured}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All that one benchmark found out."""

    name: str
    setting: str
    tables: Sequence[Table]
    goals: Sequence[Goal] = ()
    plots: Mapping[str, Figure] = dataclasses.field(default_factory=dict)


def machine() -> dict[str, str]:
    """Processor and versions, without which a time means nothing."""
    packages = ("matfree", "lineax", "equinox")
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "backend": jax.default_backend(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "constrainx": cx.__version__,
        **{package: importlib.metadata.version(package) for package in packages},
    }


def print_machine(facts: Mapping[str, str]) -> None:
    """Prints what `machine` found."""
    _console().print(_describe(facts), highlight=False)


def publish(report: Report, facts: Mapping[str, str], folder: pathlib.Path) -> None:
    """Prints the report, and writes it to the folder as ``name.json``, ``name.md`` and plots."""
    folder.mkdir(parents=True, exist_ok=True)
    console = _console()
    console.rule(report.name)
    console.print(report.setting, highlight=False)
    for table in report.tables:
        console.print(table.title, style="bold", highlight=False)
        console.print(_rich_table(table))
    for goal in report.goals:
        console.print(goal.sentence(), style="green" if goal.met else "red", highlight=False)

    (folder / f"{report.name}.json").write_text(json.dumps(_plain(report, facts), indent=2) + "\n")
    (folder / f"{report.name}.md").write_text(_markdown(report, facts))
    for name, plot in report.plots.items():
        plot.savefig(folder / f"{name}.png", dpi=150)


def figure(columns: int = 1) -> tuple[Figure, list[Any]]:
    """A figure with axes side by side, drawn without a display."""
    matplotlib.use("Agg")
    plot = Figure(figsize=(5.5 * columns, 4.2), layout="tight")
    axes = [plot.add_subplot(1, columns, i + 1) for i in range(columns)]
    for ax in axes:
        ax.grid(alpha=0.3)
    return plot, axes


def _format_number(number: float, form: str) -> str:
    return format(number, form) if math.isfinite(number) else "fails"


def _console() -> rich.console.Console:
    return rich.console.Console(width=WIDTH)


def _rich_table(table: Table) -> rich.table.Table:
    drawn = rich.table.Table()
    for name in table.columns:
        drawn.add_column(name, justify="right")
    for row in table.write_cells():
        drawn.add_row(*row)
    return drawn


def _plain(report: Report, facts: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": report.name,
        "machine": dict(facts),
        "setting": report.setting,
        "goals": [dataclasses.asdict(goal) for goal in report.goals],
        "tables": [
            {
                "title": table.title,
                "rows": [
                    dict(zip(table.columns, map(_in_json, row), strict=True)) for row in table.rows
                ],
            }
            for table in report.tables
        ],
    }


def _in_json(cell: Cell) -> Cell | None:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def _markdown(report: Report, facts: Mapping[str, str]) -> str:
    parts = [
        f"# {report.name}",
        _describe(facts),
        report.setting,
        *(table.markdown() for table in report.tables),
        *(goal.sentence() for goal in report.goals),
        *(f"![{name}]({name}.png)" for name in report.plots),
    ]
    return "\n\n".join(parts) + "\n"


def _describe(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
