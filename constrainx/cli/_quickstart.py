"""`constrainx quickstart`, the first thing that a newcomer runs."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from rich.console import Console

from constrainx.cli._command import PlainCommand
from constrainx.cli._console import print_line
from constrainx.cli._run_trainer import run_as_process
from constrainx.errors import ArgumentError

if TYPE_CHECKING:
    from constrainx.recipes import Results, Size

METHODS = ("plain", "augmentation", "nullspace")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quickstart(PlainCommand):
    """Train a network on the moment of inertia, with and without the O(3) constraint.

    Attributes:
        epochs: passes over the training data.
        out: folder for runs, table and plots.
    """

    epochs: int = 100
    out: pathlib.Path = pathlib.Path("results/quickstart")

    def execute(self) -> None:
        """Trains three methods, and prints a table and where the plots are."""
        if self.epochs < 1:
            raise ArgumentError(f"`--epochs` must be at least 1, got {self.epochs}.")
        run_as_process(self.compare)

    def compare(self, *, size: Size = "cpu") -> Results | None:
        """Trains the methods one after the other; returns None if it was asked to stop."""
        from constrainx import report
        from constrainx.recipes import Comparison
        from constrainx.recipes.o3_inertia import O3Inertia

        print_line("Moment of inertia of five particles. Does the network turn with them?")
        recipe = O3Inertia(size=size, epochs=self.epochs)
        comparison = Comparison(recipe=recipe, methods=METHODS, out=self.out)
        results = comparison.run(Console())
        if results is None:
            print_line("Stopped. The same command continues.")
            return None
        page = report.write(comparison.runs(), out=self.out / "report")
        print_line(f"Plots: {page.parent / 'violation.png'}   Page: {page}")
        print_line("Next: recipes/o3_inertia.py is the whole experiment. Change its constraint.")
        return results
