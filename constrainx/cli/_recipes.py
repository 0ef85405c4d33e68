"""`constrainx list` and `constrainx cp`: which recipes there are, and a start for your own."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import sys
from typing import ClassVar

import tyro

from constrainx.cli._command import PlainCommand
from constrainx.cli._console import print_line, print_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListRecipes(PlainCommand):
    """List the recipes."""

    def execute(self) -> None:
        """Prints name, methods and summary of each."""
        from constrainx.recipes import all_recipes, describe

        print_table(
            [
                (name, ", ".join(recipe.methods), describe(recipe))
                for name, recipe in all_recipes().items()
            ],
            headings=("recipe", "methods", "what it shows"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyRecipe(PlainCommand):
    """Copy the file of a recipe, to start your own from it.

    Attributes:
        recipe: its name.
        file: where to write the copy.
    """

    takes_recipe: ClassVar[bool] = True

    recipe: tyro.conf.Positional[str]
    file: tyro.conf.Positional[pathlib.Path]

    def execute(self) -> None:
        """Copies the file, unless there is one already."""
        from constrainx.recipes import RecipeError, find

        source = pathlib.Path(sys.modules[find(self.recipe).__module__].__file__ or "")
        if self.file.exists():
            raise RecipeError(f"{self.file} exists already: choose another name.")
        try:
            shutil.copyfile(source, self.file)
        except OSError as error:
            raise RecipeError(f"{self.file} cannot be written: {error.strerror}.") from error
        print_line(f"Wrote {self.file}. Train it: constrainx train {self.file}")
