"""`constrainx doctor`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from constrainx.cli._arguments import find_value, parse_with_fields
from constrainx.cli._command import Command, RecipeCommand
from constrainx.cli._console import print_line
from constrainx.cli._resume import WhichStep

if TYPE_CHECKING:
    from constrainx.recipes import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doctor(RecipeCommand):
    """Examine the constraints of a recipe, or of a run: rank, contradictions, cost, advice."""

    @classmethod
    def start(cls, arguments: Sequence[str], *, name: str) -> None:
        """A folder with a config.json is a run; anything else names a recipe."""
        is_run = bool(arguments) and (pathlib.Path(arguments[0]) / "config.json").is_file()
        if is_run:
            _DoctorOfRun.start(arguments, name=name)
        else:
            super().start(arguments, name=name)

    def execute(self, recipe: Recipe) -> None:
        """Examines the recipe before its first step."""
        from constrainx.recipes import build_trainer

        _print(recipe, build_trainer(recipe, progress=False).diagnose(), step=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DoctorOfRun(Command):
    """Examine the constraints of a run, at one of its checkpoints.

    Attributes:
        step: the checkpoint to examine.
        fallback: if that checkpoint is damaged, whether to take an earlier one.
        recipe: the file of the run's recipe, if it is your own: its code is executed.
    """

    step: WhichStep = "last"
    fallback: bool = False
    recipe: pathlib.Path | None = None

    @classmethod
    def start(cls, arguments: Sequence[str], *, name: str) -> None:
        """Reads the run's recipe first, whose values are the defaults of some options."""
        from constrainx.recipes import PLACE, build_trainer, read_recipe

        run = pathlib.Path(arguments[0])
        options, recipe = parse_with_fields(
            cls,
            read_recipe(run, file=find_value("recipe", arguments)),
            arguments[1:],
            command=f"{name} {run}",
            description="Examine the constraints of this run.",
            fields=PLACE,
        )
        trainer = build_trainer(recipe, run=run, progress=False)
        step = trainer.restore(options.step, fallback=options.fallback)
        _print(recipe, trainer.diagnose(), step=step)


def _print(recipe: Recipe, diagnosis: object, *, step: int) -> None:
    print_line(f"{recipe.name} {recipe.method}, step {step}")
    for line in str(diagnosis).splitlines():
        print_line(line)
