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
        out: folder for runs and tables; a folder in runs/compare, named after recipe, size, time
            and sweep, if left out.
        reuse: which runs in that folder to use again: those of "unchanged" code, or "all".
        seconds: how long every method takes steps for, without compilation and evaluation; if left
            out, as many steps as the recipe says.
        equal_time: give every method as long as the first one takes for the steps of the recipe.
        sweep: how many values to try for each method for which the recipe names a range.
        choose: by what the best of these is chosen: the smallest "error", "violation" or "product"
            of both, on held-out training data or a seed that is not reported.
    """

    without: ClassVar[Sequence[str]] = ("method", "seed")

    methods: tuple[str, ...] = ()
    seeds: int = 1
    out: pathlib.Path | None = None
    reuse: Literal["unchanged", "all"] = "unchanged"
    seconds: float | None = None
    equal_time: bool = False
    sweep: int = 0
    choose: Literal["error", "violation", "product"] = "error"

    def execute(self, recipe: Recipe) -> None:
        """Trains what has no result yet, and writes the table and a page of plots."""
        from constrainx.recipes import Comparison
        from constrainx.report import write

        name = f"{recipe.name}-{recipe.size}{self._describe_budget()}"
        out = self.out or pathlib.Path("runs/compare") / name
        comparison = Comparison(
            recipe=recipe,
            methods=self.methods,
            seeds=self.seeds,
            out=out,
            reuse=self.reuse,
            seconds=self.seconds,
            equal_time=self.equal_time,
            sweep=self.sweep,
            choose=self.choose,
        )

        def compare() -> None:
            if comparison.run(Console()) is None:
                print_line("Stopped. The same command continues the comparison.")
                return
            page = write(comparison.runs(), out=out / "report")
            print_line(f"Table: {out / 'compare.md'}   Page: {page}")
            print_line(f"Pictures: {out / 'front.png'}, {out / 'over-time.png'}")

        run_as_process(compare)

    def _describe_budget(self) -> str:
        """For the name of a folder: runs of another budget are other runs."""
        time = "-equal-time" if self.equal_time else ""
        time = f"-{self.seconds:g}s" if self.seconds is not None else time
        return f"{time}-sweep{self.sweep}" if self.sweep else time
