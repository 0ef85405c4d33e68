"""The first thing that a newcomer runs: the inertia recipe, with progress, a table and a plot."""

from __future__ import annotations

import pathlib

from rich.console import Console

from constrainx import report
from constrainx.recipes import Comparison, ComparisonError, Results, Size
from constrainx.recipes.o3_inertia import O3Inertia

METHODS = ("plain", "augmentation", "nullspace")


def run(*, epochs: int, out: pathlib.Path, size: Size = "cpu") -> Results | None:
    """Trains all methods, prints the table and writes the plot."""
    if epochs < 1:
        raise ComparisonError(f"--epochs must be at least 1, got {epochs}.")
    console = Console()
    console.print("Moment of inertia of five particles. Does the network turn with them?")
    comparison = Comparison(recipe=O3Inertia(size=size, epochs=epochs), methods=METHODS, out=out)
    results = comparison.run(console)
    if results is None:
        return None
    page = report.write(comparison.runs(), out=out / "report")
    console.print(f"Plots: {page.parent / 'violation.png'}   Page: {page}", soft_wrap=True)
    console.print("Next: recipes/o3_inertia.py is all there is to it. Change a constraint there.")
    return results
