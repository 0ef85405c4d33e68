"""A comparison in pictures: each run as a point of error and violation, and error over time."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from constrainx.report._plots import COLORS, DASHES, MARKERS
from constrainx.report._runs import Run, read_series, replace_unprintable

TRIED = "tried in a sweep, on other data"


@dataclasses.dataclass(frozen=True)
class Point:
    """A run of a comparison.

    Attributes:
        method: which method it was.
        figures: its error and, if there is one, its violation; None for what was not measured.
        seconds: spent in steps.
        is_reported: whether it is one of the runs of the table, and not of a sweep.
    """

    method: str
    figures: tuple[float | None, ...]
    seconds: float
    is_reported: bool


def draw_front(points: Sequence[Point], headings: Sequence[str], *, path: pathlib.Path) -> None:
    """Draws error against violation, every run a point; against time if there is no violation.

    Axes are logarithmic where the figures are positive and span more than a factor of three. Runs
    without finite figures are not drawn, and are counted in the title.

    Args:
        points: all runs.
        headings: what the figures are called.
        path: of the picture.
    """
    places = [(point, place) for point in points if (place := _find_place(point)) is not None]
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.subplots()
    for index, method in enumerate(dict.fromkeys(point.method for point in points)):
        for is_reported in (True, False):
            found = [
                place
                for point, place in places
                if point.method == method and point.is_reported == is_reported
            ]
            if not found:
                continue
            color = COLORS[index % len(COLORS)]
            across, up = zip(*found, strict=True)
            axes.scatter(
                across,
                up,
                s=34 if is_reported else 22,
                marker=MARKERS[index % len(MARKERS)],
                facecolors=color if is_reported else "none",
                edgecolors="white" if is_reported else color,
                linewidths=0.6 if is_reported else 1.0,
                label=f"{method}" if is_reported else None,
            )
    if any(not point.is_reported for point in points):
        axes.scatter([], [], s=22, facecolors="none", edgecolors="#333333", label=TRIED)
    for axis, values in zip("xy", zip(*(place for _, place in places), strict=True), strict=False):
        _choose_scale(axes, axis, values)
    below = headings[1] if len(headings) > 1 else "seconds in steps"
    axes.set_xlabel(replace_unprintable(below), parse_math=False)
    axes.set_ylabel(replace_unprintable(headings[0]), parse_math=False)
    if lost := len(points) - len(places):
        axes.set_title(f"{lost} of {len(points)} runs have no finite figures", fontsize=9)
    _finish(figure, axes, path)


def draw_over_time(
    runs: Mapping[str, Sequence[tuple[Run, float]]],
    keys: Sequence[str],
    headings: Sequence[str],
    *,
    path: pathlib.Path,
) -> bool:
    """Draws how the figures fell over the time spent in steps, a line for each run.

    Args:
        runs: for each method its runs, each with the mean time of its steps.
        keys: the metrics, of which those that were measured more than once are drawn.
        headings: what they are called.
        path: of the picture.

    Returns:
        Whether there was anything to draw.
    """
    everything = [run for each in runs.values() for run, _ in each]
    drawn = [
        (key, heading)
        for key, heading in zip(keys, headings, strict=True)
        if any(len(read_series(run.evaluation, key)[0]) > 1 for run in everything)
    ]
    path.unlink(missing_ok=True)
    if not drawn:
        return False
    figure = Figure(figsize=(6.4, 1.2 + 2.8 * len(drawn)), layout="constrained")
    grid = figure.subplots(len(drawn), 1, squeeze=False, sharex=True)
    for axes, (key, heading) in zip(grid.flat, drawn, strict=True):
        seen: list[float] = []
        for index, (method, each) in enumerate(runs.items()):
            for number, (run, step_seconds) in enumerate(each):
                steps, values = read_series(run.evaluation, key)
                axes.plot(
                    [step * step_seconds for step in steps],
                    values,
                    color=COLORS[index % len(COLORS)],
                    linestyle=DASHES[index // len(COLORS) % len(DASHES)],
                    linewidth=1.2,
                    alpha=0.8,
                    label=method if number == 0 else None,
                )
                seen += [value for value in values if math.isfinite(value)]
        _choose_scale(axes, "y", seen)
        axes.set_ylabel(replace_unprintable(heading), parse_math=False)
    grid[-1, 0].set_xlabel("seconds in steps")
    _finish(figure, grid[0, 0], path, others=list(grid.flat[1:]))
    return True


def _find_place(point: Point) -> tuple[float, float] | None:
    error, *rest = point.figures
    across = rest[0] if rest else point.seconds
    if error is None or across is None or not math.isfinite(error) or not math.isfinite(across):
        return None
    return across, error


def _choose_scale(axes: Axes, axis: str, values: Sequence[float]) -> None:
    if values and min(values) > 0 and max(values) > 3 * min(values):
        (axes.set_xscale if axis == "x" else axes.set_yscale)("log")


def _finish(
    figure: Figure, first: Axes, path: pathlib.Path, *, others: Sequence[Axes] = ()
) -> None:
    for axes in (first, *others):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9, which="both")
    handles, labels = first.get_legend_handles_labels()
    if handles:
        legend = figure.legend(
            handles,
            [str(number) for number in range(len(labels))],
            loc="outside upper left",
            ncols=max(1, min(4, 72 // (max(map(len, labels)) + 6))),
            frameon=False,
            fontsize=9,
        )
        # A label that begins with an underscore, or has a dollar sign, would not be shown as it is.
        for text, label in zip(legend.get_texts(), labels, strict=True):
            text.set_text(replace_unprintable(label))
            text.set_parse_math(False)
    figure.savefig(path, dpi=150, metadata={"Software": None})
