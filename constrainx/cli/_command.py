"""What a command is: a dataclass whose fields are its options."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from constrainx.cli._arguments import list_flags, parse, parse_with_fields, take_subject


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(abc.ABC):
    """A command. The first line of its docstring is what ``constrainx --help`` shows.

    To keep that fast, the module of a command imports what needs JAX inside its functions.
    ``takes_recipe`` says whether its first argument is the name of a recipe, for completion.
    """

    takes_recipe: ClassVar[bool] = False

    @classmethod
    def list_flags(cls) -> list[str]:
        """The options of the command, for completion."""
        return list_flags(cls)

    @classmethod
    @abc.abstractmethod
    def start(cls, arguments: Sequence[str], *, name: str) -> None:
        """Parses the arguments and executes the command.

        Args:
            arguments: the words after the command on the command line.
            name: of the command.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainCommand(Command):
    """A command whose options are always the same: give it fields, and write `execute`."""

    @classmethod
    def start(cls, arguments: Sequence[str], *, name: str) -> None:
        """Parses the arguments and executes the command."""
        parse(cls, arguments, command=name).execute()

    @abc.abstractmethod
    def execute(self) -> None:
        """Does what the command is for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeCommand(Command):
    """A command for a recipe, whose fields are options in addition to the command's own.

    ``without`` names the fields that are not, because the command sets them itself.
    """

    takes_recipe: ClassVar[bool] = True
    without: ClassVar[Sequence[str]] = ()

    @classmethod
    def start(cls, arguments: Sequence[str], *, name: str) -> None:
        """Finds the recipe first, because the options depend on it."""
        about = "the name of a recipe, or a file with your own, such as my_recipe.py"
        recipe_name = take_subject(arguments, cls, command=name, metavar="RECIPE", about=about)
        # Here, so that the help text above does not wait for JAX.
        from constrainx.recipes import SIZES, describe, find

        kind = find(recipe_name)
        options, recipe = parse_with_fields(
            cls,
            kind(),
            arguments[1:],
            command=f"{name} {recipe_name}",
            description=f"{describe(kind)} Methods: {', '.join(kind.methods)}. "
            f"Sizes: {', '.join(SIZES)}.",
            fields=[field for field in kind.field_names() if field not in cls.without],
        )
        options.execute(recipe)

    @abc.abstractmethod
    def execute(self, recipe: Any) -> None:
        """Does what the command is for, with the recipe that the options describe."""
