"""The first thing that a newcomer runs: the inertia recipe, with progress, a table and a plot."""

from __future__ import annotations

import pathlib

from rich.console import Console

from constrainx import report
from constrainx.recipes import Comparison, ComparisonError, Results, find

METHODS = ("plain", "augmentation", "nullspace")


def run(*, epochs: int, out: pathlib.Path, size: str = "cpu") -> Results:
    """Trains all methods, prints the table and writes the plot."""
    if epochs < 1:
        raise ComparisonError(f"--epochs must be at least 1, got {epochs}.")
    console = Console()
    console.print("Moment of inertia of five particles. Does the network turn with them?")
    comparison = Comparison(
        recipe=find("o3-inertia"),
        methods=METHODS,
        seeds=1,
        size=size,
        fields={"epochs": epochs},
        out=out,
    )
    results = comparison.run(console)
    page = report.write(comparison.runs(), out=out / "report")
    console.print(f"Plots: {page.parent / 'violation.png'}   Page: {page}", soft_wrap=True)
    console.print("Next: recipes/o3_inertia.py is all there is to it. Change a constraint there.")
    return results
