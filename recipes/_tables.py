"""The table of a comparison, for a terminal and for Markdown."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from constrainx.recipes._equal_time import Share

Results = dict[str, list[dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table as text, before it is drawn.

    Attributes:
        title: above it.
        headings: one for each column.
        rows: one text for each column; the first names the row, the others are figures.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def draw(self) -> Table:
        """For a terminal. `Text` shows a name such as ``a[/b]`` as it is, not as markup."""
        table = Table(title=Text(join_lines(self.title)), title_justify="left")
        for index, heading in enumerate(self.headings):
            table.add_column(Text(join_lines(heading)), justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*(Text(join_lines(cell)) for cell in row))
        return table

    def fit(self, width: int) -> list[Grid]:
        """The same table, or several with some of its columns each, so that none is too wide.

        A column that is too wide even alone stays whole; its cells are then drawn on several lines.

        Args:
            width: of the terminal, in characters.
        """
        columns = [[self.headings[i], *(row[i] for row in self.rows)] for i in self._indices]
        widths = [max(cell_len(join_lines(cell)) for cell in column) + 3 for column in columns]
        parts: list[list[int]] = [[]]
        for index in self._indices[1:]:
            together = [0, *parts[-1], index]
            if parts[-1] and sum(widths[i] for i in together) + 1 > width:
                parts.append([])
            parts[-1].append(index)
        return [
            Grid(
                self.title if number == 0 else f"{self.title}, continued",
                [self.headings[i] for i in (0, *part)],
                [[row[i] for i in (0, *part)] for row in self.rows],
            )
            for number, part in enumerate(parts)
        ]

    @property
    def _indices(self) -> range:
        return range(len(self.headings))

    def write(self) -> str:
        """As Markdown."""
        lines = [self.headings, ["---", *["---:"] * (len(self.headings) - 1)], *self.rows]
        body = "\n".join(
            "| " + " | ".join(join_lines(cell).replace("|", "\\|") for cell in line) + " |"
            for line in lines
        )
        return f"{join_lines(self.title)}.\n\n{body}\n"


def tabulate_results(title: str, results: Results, headings: Mapping[str, str]) -> Grid:
    """A row for each method: mean and standard deviation of each metric over the seeds."""
    rows = [
        [
            method,
            *(_format_spread(run["metrics"].get(name) for run in runs) for name in headings),
            f"{statistics.mean(run['seconds'] for run in runs):.0f} s",
        ]
        for method, runs in results.items()
    ]
    return Grid(title, ["method", *headings.values(), "time"], rows)


def tabulate_published(
    published: Mapping[str, Mapping[str, str]], methods: Iterable[str], headings: Mapping[str, str]
) -> Grid | None:
    """The paper's figures for the same methods and metrics; None if it has none of these."""
    known = [name for name in headings if any(name in row for row in published.values())]
    if not known:
        return None
    rows = [
        [method, *(published[method].get(name, "") for name in known)]
        for method in methods
        if method in published
    ]
    return Grid("The paper's figures", ["method", *(headings[name] for name in known)], rows)


def join_lines(text: str) -> str:
    """The text on one line, so that it fits into a cell."""
    return " ".join(text.splitlines())


def tabulate_shares(shares: Mapping[str, Share], results: Results) -> Grid:
    """How the time was shared: the time of a step as it was measured, and what a run then took.

    Args:
        shares: of each method.
        results: of the runs that had them.
    """
    rows = [
        [
            method,
            f"{1000 * share.step_seconds:.3g} ms",
            f"{share.steps}",
            ", ".join(f"{name} {value:.4g}" for name, value in share.fields.items()),
            f"{statistics.mean(run['seconds'] for run in results[method]):.3g} s",
        ]
        for method, share in shares.items()
    ]
    seconds = next(iter(shares.values())).seconds
    title = f"Equal time, {seconds:.3g} s of steps for every run"
    return Grid(title, ["method", "a step", "steps", "that is", "taken"], rows)


def _format_spread(values: Iterable[float | None]) -> str:
    found = list(values)
    figures = [value for value in found if value is not None]
    if len(figures) < len(found):  # of an older version, which did not measure this
        return "–"
    mean = statistics.mean(figures)
    if len(figures) == 1 or not math.isfinite(mean):
        return f"{mean:.3g}"
    return f"{mean:.3g} ± {statistics.stdev(figures):.2g}"
