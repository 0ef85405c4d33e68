"""`constrainx report`."""

from __future__ import annotations

import dataclasses
import pathlib

import tyro

from constrainx.cli._command import PlainCommand
from constrainx.cli._console import print_line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(PlainCommand):
    """Draw loss, violations, solver iterations and time of runs: an HTML page, and PNGs.

    Attributes:
        runs: folders of runs.
        out: folder for the page and the plots.
    """

    runs: tyro.conf.Positional[tuple[pathlib.Path, ...]]
    out: pathlib.Path = pathlib.Path("results/report")

    def execute(self) -> None:
        """Writes the page."""
        from constrainx.report import write

        print_line(f"Page: {write(self.runs, out=self.out)}")
