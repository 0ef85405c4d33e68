"""Draws runs over each other, each in a colour of its own."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import warnings
from collections.abc import Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

from constrainx.report._runs import Run, printable, series

Dashes = Literal["-", "--", ":", "-."]


# Okabe and Ito's colours, which colour-blind readers can tell apart, without the yellow (too faint
# on white) and with grey for black (which vanishes on a dark page).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B6B6B")


DASHES: tuple[Dashes, ...] = ("-", "--", ":", "-.")


MARKERS = ("o", "s", "^", "D")


FIGURES = {
    "loss": "Loss",
    "violation": "Violation of the constraints",
    "metrics": "Evaluation",
    "solver": "Solver iterations",
    "time": "Time",
}


@dataclasses.dataclass(frozen=True)
class Shown:
    """A run with the name and the looks that it keeps throughout the page."""

    run: Run
    name: str
    label: str
    color: str
    dashes: Dashes
    marker: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes: a field of the training lines, of the evaluation lines, or of both."""

    title: str
    train: str | None = None
    evaluation: str | None = None
    scale: Literal["log", "wide", "zero", "share"]


def panels_of(runs: Sequence[Run]) -> dict[str, list[Panel]]:
    constraints = constraints_of(runs)
    panels = {
        "loss": [Panel(title="training loss", train="loss", scale="log")],
        "violation": [
            panel
            for name in constraints
            for panel in (
                Panel(
                    title=f"{name}, on held-out data", evaluation=f"violation/{name}", scale="log"
                ),
                # Rows are reduced and scaled for the step: not the figure that people read.
                Panel(
                    title=f"{name}, root mean square of the rows in training",
                    train=f"constraints/{name}/violation",
                    scale="log",
                ),
            )
        ],
        "metrics": [
            Panel(title=key, evaluation=key, scale="wide")
            for key in evaluated_in(runs)
            if not key.startswith("violation/")
        ],
        "solver": [
            Panel(title=name, train=f"constraints/{name}/iterations", scale="zero")
            for name in constraints
        ],
        "time": [
            Panel(title="steps per second", train="steps_per_second", scale="zero"),
            Panel(title="share of time spent waiting for data", train="data_wait", scale="share"),
        ],
    }
    return {
        name: [panel for panel in group if any(values_of(panel, run) for run in runs)]
        for name, group in panels.items()
    }


def constraints_of(runs: Sequence[Run]) -> list[str]:
    """The names of the constraints, in the order in which they first appear."""
    fields = dict.fromkeys(key for run in runs for row in run.train for key in row)
    found = [re.fullmatch(r"constraints/(.+)/(violation|iterations)", key) for key in fields]
    trained = [match[1] for match in found if match]
    evaluated = [key for key in evaluated_in(runs) if key.startswith("violation/")]
    return list(dict.fromkeys([*trained, *(key.removeprefix("violation/") for key in evaluated)]))


def evaluated_in(runs: Sequence[Run]) -> list[str]:
    """The figures that evaluations recorded, in the order in which they first appear."""
    return list(
        dict.fromkeys(
            key
            for run in runs
            for row in run.evaluation
            for key, value in row.items()
            if key not in ("step", "time", "kind")
            and (value is None or isinstance(value, int | float))
        )
    )


def values_of(panel: Panel, run: Run) -> list[float]:
    values = series(run.train, panel.train)[1] + series(run.evaluation, panel.evaluation)[1]
    return [value for value in values if math.isfinite(value)]


def draw(panels: Sequence[Panel], shown: Sequence[Shown], *, path: pathlib.Path) -> None:
    columns = 1 if len(panels) <= 4 else 2
    rows = math.ceil(len(panels) / columns)
    entries = _legend(panels, shown)
    longest = max((len(label) for label, _ in entries), default=0)
    legend_columns = max(1, min(4, len(entries), 84 * columns // (longest + 8)))
    legend_rows = math.ceil(len(entries) / legend_columns)
    # Agg draws at most 2¹⁶ pixels.
    height = min((3.4 if rows == 1 else 2.4 * rows) + 0.22 * legend_rows, 400.0)
    with warnings.catch_warnings():  # Names may hold letters that the font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(7.0 * columns**0.5, height), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for index, axes in enumerate(grid.flat):
            if index >= len(panels):
                axes.set_visible(False)
                continue
            _fill(axes, panels[index], shown)
            if index + columns >= len(panels):
                axes.set_xlabel("step")
                axes.tick_params(labelbottom=True)
        if entries:
            # A label that begins with an underscore would be left out, so they are set afterwards.
            legend = figure.legend(
                [handle for _, handle in entries],
                [str(number) for number in range(len(entries))],
                loc="outside upper left",
                ncols=legend_columns,
                frameon=False,
                fontsize=9,
            )
            for text, (label, _) in zip(legend.get_texts(), entries, strict=True):
                text.set_text(label)
                text.set_parse_math(False)  # A dollar in a name is a dollar.
        figure.savefig(path, dpi=150, metadata={"Software": None})


def _legend(panels: Sequence[Panel], shown: Sequence[Shown]) -> list[tuple[str, Line2D]]:
    entries = []
    if len(shown) > 1:
        for one in shown:
            line = Line2D([], [], color=one.color, linestyle=one.dashes, linewidth=2)
            entries.append((one.label, line))
    runs = [one.run for one in shown]
    if any(
        panel.train and any(series(run.evaluation, panel.evaluation)[0] for run in runs)
        for panel in panels
    ):
        dark = "#333333"
        entries.append(("training", Line2D([], [], color=dark, linewidth=1.3)))
        marker = Line2D([], [], color=dark, linestyle="", marker="o", markersize=5)
        entries.append(("evaluation", marker))
    return entries


def _fill(axes: Axes, panel: Panel, shown: Sequence[Shown]) -> None:
    for one in shown:
        steps, values = series(one.run.train, panel.train)
        finite = [False, *map(math.isfinite, values), False]
        # A point without neighbours has no line to be seen by.
        alone = [
            index
            for index in range(len(values))
            if finite[index + 1] and not finite[index] and not finite[index + 2]
        ]
        axes.plot(
            steps, values, color=one.color, linestyle=one.dashes, linewidth=1.3, alpha=0.85,
            marker=".", markevery=alone,
        )  # fmt: skip
        axes.plot(
            *series(one.run.evaluation, panel.evaluation), color=one.color,
            linestyle="" if panel.train else one.dashes, linewidth=1.3, marker=one.marker,
            markersize=5, markeredgecolor="white", markeredgewidth=0.6,
        )  # fmt: skip
    values = [value for one in shown for value in values_of(panel, one.run)]
    low, high = min(values), max(values)
    if low > 0 and (panel.scale == "log" or (panel.scale == "wide" and high > 100 * low)):
        axes.set_yscale("log")
        if high < 10 * low:  # Too few powers of ten to read the axis by.
            axes.yaxis.set_major_locator(MaxNLocator(5))
            axes.yaxis.set_major_formatter(ScalarFormatter(useOffset=False))
            axes.yaxis.set_minor_locator(NullLocator())
    elif panel.scale in ("zero", "share"):
        axes.set_ylim(bottom=min(0.0, low), top=1.08 * high if high > 0 else 1.0)
    if panel.scale == "share":
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axes.set_title(printable(panel.title), loc="left", fontsize=10, parse_math=False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, which="both")


def distinct(folders: Sequence[pathlib.Path]) -> list[str]:
    """The folders' names, with as many of their parents as it takes to tell them apart."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return [printable(name) for name in names]


def shortened(names: Sequence[str]) -> list[str]:
    """The names with the words that all of them begin with replaced by an ellipsis."""
    words = [re.split(r"(?<=[-_./ ])", name) for name in names]
    common = 0
    # The last word stays, so that no name is left empty.
    while common < min(map(len, words)) - 1 and len({some[common] for some in words}) == 1:
        common += 1
    if len(names) == 1 or common == 0:
        return list(names)
    return ["…" + "".join(some[common:]) for some in words]
