"""What a command is: a dataclass whose fields are its options."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from constrainx.cli._arguments import list_flags, parse, parse_with_fields, take_subject

if TYPE_CHECKING:
    from constrainx.recipes import Recipe

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(abc.ABC):
    """A command. The first line of its docstring is what ``constrainx --help`` shows.

    To keep that fast, the module of a command imports what needs JAX inside its functions.
    For completion, ``takes_recipe`` says whether its first argument is the name of a recipe, and
    ``first_words`` lists what can stand before that.
    """

    takes_recipe: ClassVar[bool] = False
    first_words: ClassVar[Sequence[str]] = ()

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
        _, options, recipe = read_with_recipe(cls, arguments, name=name, without=cls.without)
        options.execute(recipe)

    @abc.abstractmethod
    def execute(self, recipe: Any) -> None:
        """Does what the command is for, with the recipe that the options describe."""


def read_with_recipe(
    kind: type[T], arguments: Sequence[str], *, name: str, without: Sequence[str]
) -> tuple[str, T, Recipe]:
    """The name of a recipe, a command's own options, and the recipe that the others describe.

    Args:
        kind: a dataclass of the command's own options.
        arguments: the words after the command on the command line.
        name: of the command.
        without: fields of recipes that are no options.
    """
    about = "the name of a recipe, or a file with your own, such as my_recipe.py"
    recipe_name = take_subject(arguments, kind, command=name, metavar="RECIPE", about=about)
    # Here, so that the help text above does not wait for JAX.
    from constrainx.recipes import SIZES, describe, find

    found = find(recipe_name)
    options, recipe = parse_with_fields(
        kind,
        found(),
        arguments[1:],
        command=f"{name} {recipe_name}",
        description=f"{describe(found)} Methods: {', '.join(found.methods)}. "
        f"Sizes: {', '.join(SIZES)}.",
        fields=[field for field in found.field_names() if field not in without],
    )
    return recipe_name, options, recipe
