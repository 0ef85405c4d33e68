"""`constrainx list`, `new` and `cp`: which recipes there are, and a start for your own."""

from __future__ import annotations

import dataclasses
import pathlib
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
    """Copy the file of a recipe, as a start for your own.

    Attributes:
        recipe: its name.
        file: where to write the copy.
    """

    takes_recipe: ClassVar[bool] = True

    recipe: tyro.conf.Positional[str]
    file: tyro.conf.Positional[pathlib.Path]

    def execute(self) -> None:
        """Copies the file, unless there is one already."""
        from constrainx.recipes import find

        source = pathlib.Path(sys.modules[find(self.recipe).__module__].__file__ or "")
        _write_new(self.file, source.read_text())


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewRecipe(PlainCommand):
    """Write a small recipe with comments, as a start for your own: constrainx new my_recipe.py.

    Attributes:
        file: where to write it.
    """

    file: tyro.conf.Positional[pathlib.Path]

    def execute(self) -> None:
        """Writes the file, unless there is one already, with names made from its own."""
        from constrainx.recipes import read_starter

        _write_new(self.file, read_starter(self.file))


def _write_new(file: pathlib.Path, text: str) -> None:
    from constrainx.recipes import RecipeError

    if file.suffix != ".py":
        raise RecipeError(f"a recipe is a Python file: write {file.with_suffix('.py')}.")
    try:
        with file.open("x") as opened:
            opened.write(text)
    except FileExistsError:
        raise RecipeError(f"{file} exists already: choose another name.") from None
    except OSError as error:
        raise RecipeError(f"{file} cannot be written: {error.strerror}.") from error
    print_line(f"Wrote {file}. Train it: constrainx train {file}")
