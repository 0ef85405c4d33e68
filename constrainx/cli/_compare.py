"""`constrainx compare`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from rich.console import Console

from constrainx.cli._command import RecipeCommand
from constrainx.cli._console import print_line
from constrainx.cli._run_trainer import run_as_process

if TYPE_CHECKING:
    from constrainx.recipes import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(RecipeCommand):
    """Train several methods of a recipe with several seeds, and print one table.

    Attributes:
        methods: which methods; if left out, those that the recipe lists for comparison.
        seeds: how many seeds; the first is 0.
        out: folder for runs and tables; runs/compare/RECIPE-SIZE if left out.
        reuse: which runs in that folder to use again: those of "unchanged" code, or "all".
    """

    without: ClassVar[Sequence[str]] = ("method", "seed")

    methods: tuple[str, ...] = ()
    seeds: int = 1
    out: pathlib.Path | None = None
    reuse: Literal["unchanged", "all"] = "unchanged"

    def execute(self, recipe: Recipe) -> None:
        """Trains what has no result yet, and writes the table and a page of plots."""
        from constrainx.recipes import Comparison
        from constrainx.report import write

        out = self.out or pathlib.Path("runs/compare") / f"{recipe.name}-{recipe.size}"
        comparison = Comparison(
            recipe=recipe, methods=self.methods, seeds=self.seeds, out=out, reuse=self.reuse
        )

        def compare() -> None:
            if comparison.run(Console()) is None:
                print_line("Stopped. The same command continues the comparison.")
                return
            page = write(comparison.runs(), out=out / "report")
            print_line(f"Table: {out / 'compare.md'}   Page: {page}")

        run_as_process(compare)
