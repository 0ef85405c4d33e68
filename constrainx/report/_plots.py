"""Draws runs over each other, each in its own colour."""

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

from constrainx.report._runs import Run, read_series, replace_unprintable
from constrainx.runtime import (
    constraint_metric,
    parse_constraint_metric,
    parse_relative_metric,
    parse_violation_metric,
    relative_metric,
    violation_metric,
)

Dashes = Literal["-", "--", ":", "-."]


# Okabe and Ito's colours, which colour-blind readers can tell apart. Yellow is left out as too
# faint on white, and grey replaces black, which would vanish on a dark page.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B6B6B")
DASHES: tuple[Dashes, ...] = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
# The title of each figure, by the name of its file.
FIGURES = {
    "loss": "Loss",
    "violation": "Violation of the constraints",
    "metrics": "Evaluation",
    "solver": "Solver iterations",
    "time": "Time",
}
# The fields of a constraint's report that panels show.
_DRAWN = ("violation", "iterations")


@dataclasses.dataclass(frozen=True)
class Shown:
    """A run, with the name, colour and marker that it keeps throughout the page."""

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


def arrange_panels(runs: Sequence[Run]) -> dict[str, list[Panel]]:
    """The panels of each figure, without those that no run has data for."""
    constraints = find_constraints(runs)
    panels = {
        "loss": [Panel(title="training loss", train="loss", scale="log")],
        "violation": [
            panel
            for name in constraints
            for panel in (
                Panel(
                    title=f"{name}, on held-out data",
                    evaluation=violation_metric(name),
                    scale="log",
                ),
                Panel(
                    title=f"{name}, relative to the output",
                    evaluation=relative_metric(name),
                    scale="log",
                ),
                # Rows are reduced and scaled for the step, so this is not the figure to quote.
                Panel(
                    title=f"{name}, root mean square of the rows in training",
                    train=constraint_metric(name, "violation"),
                    scale="log",
                ),
            )
        ],
        "metrics": [
            Panel(title=key, evaluation=key, scale="wide")
            for key in find_evaluated(runs)
            if parse_violation_metric(key) is None and parse_relative_metric(key) not in constraints
        ],
        "solver": [
            Panel(title=name, train=constraint_metric(name, "iterations"), scale="zero")
            for name in constraints
        ],
        "time": [
            Panel(title="steps per second", train="steps_per_second", scale="zero"),
            Panel(title="share of time spent waiting for data", train="data_wait", scale="share"),
        ],
    }
    return {
        name: [panel for panel in group if any(finite_values(panel, run) for run in runs)]
        for name, group in panels.items()
    }


def find_constraints(runs: Sequence[Run]) -> list[str]:
    """The names of the constraints, in the order in which they first appear."""
    keys = dict.fromkeys(key for run in runs for row in run.train for key in row)
    figures = [parse_constraint_metric(key) for key in keys]
    trained = [figure[0] for figure in figures if figure and figure[1] in _DRAWN]
    evaluated = [parse_violation_metric(key) for key in find_evaluated(runs)]
    return list(dict.fromkeys([*trained, *(name for name in evaluated if name)]))


def find_evaluated(runs: Sequence[Run]) -> list[str]:
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


def finite_values(panel: Panel, run: Run) -> list[float]:
    """All finite values that a run adds to a panel; the axis is chosen from them."""
    trained = read_series(run.train, panel.train)[1]
    evaluated = read_series(run.evaluation, panel.evaluation)[1]
    return [value for value in (*trained, *evaluated) if math.isfinite(value)]


def draw_panels(panels: Sequence[Panel], shown: Sequence[Shown], *, path: pathlib.Path) -> None:
    """Writes one figure: panels below each other, in two columns if there are many."""
    columns = 1 if len(panels) <= 4 else 2
    rows = math.ceil(len(panels) / columns)
    entries = _make_legend(panels, shown)
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
            _draw_panel(axes, panels[index], shown)
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
                text.set_parse_math(False)  # A dollar sign in a name is not the start of a formula.
        figure.savefig(path, dpi=150, metadata={"Software": None})


def _make_legend(panels: Sequence[Panel], shown: Sequence[Shown]) -> list[tuple[str, Line2D]]:
    entries = []
    if len(shown) > 1:
        for one in shown:
            line = Line2D([], [], color=one.color, linestyle=one.dashes, linewidth=2)
            entries.append((one.label, line))
    runs = [one.run for one in shown]
    if any(
        panel.train and any(read_series(run.evaluation, panel.evaluation)[0] for run in runs)
        for panel in panels
    ):
        dark = "#333333"
        entries.append(("training", Line2D([], [], color=dark, linewidth=1.3)))
        marker = Line2D([], [], color=dark, linestyle="", marker="o", markersize=5)
        entries.append(("evaluation", marker))
    return entries


def _draw_panel(axes: Axes, panel: Panel, shown: Sequence[Shown]) -> None:
    for one in shown:
        steps, values = read_series(one.run.train, panel.train)
        finite = [False, *map(math.isfinite, values), False]
        # A point without neighbours is on no line, and would not be seen.
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
            *read_series(one.run.evaluation, panel.evaluation), color=one.color,
            linestyle="" if panel.train else one.dashes, linewidth=1.3, marker=one.marker,
            markersize=5, markeredgecolor="white", markeredgewidth=0.6,
        )  # fmt: skip
    values = [value for one in shown for value in finite_values(panel, one.run)]
    low, high = min(values), max(values)
    if low > 0 and (panel.scale == "log" or (panel.scale == "wide" and high > 100 * low)):
        axes.set_yscale("log")
        if high < 10 * low:  # Labels at powers of ten would be too few.
            axes.yaxis.set_major_locator(MaxNLocator(5))
            axes.yaxis.set_major_formatter(ScalarFormatter(useOffset=False))
            axes.yaxis.set_minor_locator(NullLocator())
    elif panel.scale in ("zero", "share"):
        axes.set_ylim(bottom=min(0.0, low), top=1.08 * high if high > 0 else 1.0)
    if panel.scale == "share":
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axes.set_title(replace_unprintable(panel.title), loc="left", fontsize=10, parse_math=False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, which="both")


def name_folders(folders: Sequence[pathlib.Path]) -> list[str]:
    """The folders' names, with as many of their parents as it takes to tell them apart."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return [replace_unprintable(name) for name in names]


def shorten_names(names: Sequence[str]) -> list[str]:
    """The names, with an ellipsis in place of the words that all of them begin with."""
    words = [re.split(r"(?<=[-_./ ])", name) for name in names]
    common = 0
    # The last word stays, so that no name is left empty.
    while common < min(map(len, words)) - 1 and len({some[common] for some in words}) == 1:
        common += 1
    if len(names) == 1 or common == 0:
        return list(names)
    return ["…" + "".join(some[common:]) for some in words]
