"""Reading the arguments of a command, and those that are the fields of a recipe."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from constrainx.errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
    from constrainx.recipes import Recipe

T = TypeVar("T")
_annotated: Any = tyro.conf.Positional
POSITIONAL = _annotated[str].__metadata__[0]


def parse(
    kind: type[T],
    arguments: Sequence[str],
    *,
    command: str,
    description: str | None = None,
) -> T:
    """Builds a dataclass from the arguments.

    Args:
        kind: the dataclass; its fields are the options, its docstring is the help text.
        arguments: the words after the command on the command line.
        command: the name of the command in help text and errors, such as ``train o3-inertia``.
        description: above the options, instead of the class's docstring.

    Raises:
        ArgumentError: there is no such option; the message has the nearest one that exists.
    """
    parsed, unknown = tyro.cli(
        kind,
        prog=f"constrainx {command}",
        description=description,
        args=list(arguments),
        return_unknown_args=True,
    )
    if unknown:
        word = unknown[0].split("=")[0]
        what = "option" if word.startswith("-") else "argument"
        raise ArgumentError(
            f"`constrainx {command}` has no {what} `{word}`."
            f"{did_you_mean(word, list_flags(kind), cutoff=0.5)} `constrainx {command} --help` "
            "shows all."
        )
    return parsed


def take_subject(
    arguments: Sequence[str], kind: type, *, command: str, metavar: str, about: str
) -> str:
    """The first argument, on which the other options depend; or prints the help text and exits.

    Args:
        arguments: the words after the command on the command line.
        kind: a dataclass of the options that do not depend on the subject.
        command: the name of the command in help text and errors.
        metavar: the name of the subject there, such as ``RECIPE``.
        about: what the subject is.

    Raises:
        ArgumentError: there is no argument, or an option comes first.
    """
    if arguments and not arguments[0].startswith("-"):
        return arguments[0]
    if {"-h", "--help"} & {*arguments}:
        subject = tyro.conf.arg(metavar=metavar, help=f"{about}.", name="")
        both = dataclasses.make_dataclass(
            "Arguments",
            [
                ("subject", Annotated[str, subject, POSITIONAL]),
                ("options", Annotated[kind, tyro.conf.arg(name="")]),
            ],
        )
        summary = (inspect.getdoc(kind) or "").split("\n")[0]
        more = (
            f"`constrainx {command} {metavar} --help` also shows options that depend on {metavar}."
        )
        parse(both, ["--help"], command=command, description=f"{summary}\n\n{more}")
    raise ArgumentError(
        f"`constrainx {command}` needs {metavar} as its first argument: {about}. For example: "
        f"`constrainx {command} {metavar} {' '.join(arguments)}".rstrip()
        + "`."
    )


def parse_with_fields(
    kind: type[T],
    recipe: Recipe,
    arguments: Sequence[str],
    *,
    command: str,
    description: str,
    fields: Collection[str],
) -> tuple[T, Recipe]:
    """Builds a command's own options, and a recipe with the fields that are given.

    Args:
        kind: a dataclass of the command's own options.
        recipe: where fields that are not given come from.
        arguments: the words after the command on the command line.
        command: the name of the command in help text and errors.
        description: above the options.
        fields: names of the recipe's fields that can be given.
    """
    # Another method or size changes the defaults of the other fields, which `--help` shows, too.
    early = {
        name: value
        for name in ("preset", "method", "size")
        if name in fields and (value := find_value(name, arguments)) is not None
    }
    before = recipe.but(**early)
    options_of_recipe = _make_dataclass(before, fields)
    both = dataclasses.make_dataclass(
        "Arguments",
        [
            ("options", Annotated[kind, tyro.conf.arg(name="")]),
            ("fields", Annotated[options_of_recipe, tyro.conf.arg(name="")]),
        ],
    )
    parsed: Any = parse(both, arguments, command=command, description=description)
    given = _find_given(fields, arguments)
    changed = {
        name: value
        for name in fields
        if (value := getattr(parsed.fields, name)) != getattr(before, name) or name in given
    }
    return parsed.options, recipe.but(**changed)


def keep_others(kind: type, arguments: Sequence[str]) -> list[str]:
    """The arguments that are no options of a dataclass, as they were written."""
    _, others = tyro.cli(kind, args=list(arguments), return_unknown_args=True)
    return others


def list_flags(kind: Any, *, only: Collection[str] | None = None) -> list[str]:
    """The options of a dataclass, such as ``--save-every`` and ``--keep.last``.

    Args:
        kind: the dataclass.
        only: names of the fields to list; all if None.
    """
    flags = []
    hints = typing.get_type_hints(kind, include_extras=True)
    for name in (field.name for field in dataclasses.fields(kind)):
        extras = getattr(hints[name], "__metadata__", ())
        plain = hints[name].__origin__ if extras else hints[name]
        flag = f"--{name.replace('_', '-')}"
        is_hidden = name.startswith("_") or (only is not None and name not in only)
        if POSITIONAL in extras or is_hidden:
            continue
        if not dataclasses.is_dataclass(plain):
            flags.append(flag)
        elif any(getattr(extra, "name", None) == "" for extra in extras):
            flags += list_flags(plain)
        else:
            flags += [inner.replace("--", f"{flag}.", 1) for inner in list_flags(plain)]
    return flags


def _make_dataclass(recipe: Recipe, names: Collection[str]) -> type:
    """A dataclass with these fields of a recipe, and their help texts."""
    hints = typing.get_type_hints(type(recipe), include_extras=True)
    help_texts = _read_help(type(recipe))
    return dataclasses.make_dataclass(
        "Fields",
        [
            (
                name,
                Annotated[hints[name], tyro.conf.arg(help=help_texts.get(name, ""))],
                dataclasses.field(default_factory=functools.partial(getattr, recipe, name)),
            )
            for name in names
        ],
        kw_only=True,
    )


def _read_help(recipe: type) -> dict[str, str]:
    """What the docstrings of a recipe and of its base classes say about its fields."""
    found: dict[str, str] = {}
    for kind in reversed(recipe.__mro__):
        text = inspect.cleandoc(kind.__doc__ or "")
        section = re.search(r"^Attributes:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
        if section:
            entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section[1], re.MULTILINE)
            found |= {name: " ".join(help_text.split()) for name, help_text in entries}
    return found


def _find_given(fields: Collection[str], arguments: Sequence[str]) -> set[str]:
    """The fields whose options are among the arguments, whatever their values are.

    A field that is given its default value must still win over what another method of a comparison
    sets.
    """
    words = [
        argument.removeprefix("--").split("=")[0].split(".")[0].replace("-", "_")
        for argument in arguments
        if argument.startswith("--")
    ]
    return {name for name in fields if name in words or f"no_{name}" in words}


def find_value(name: str, arguments: Sequence[str]) -> str | None:
    """The value of an option that takes one, before all arguments are parsed."""
    for index, argument in enumerate(arguments):
        if argument == f"--{name}" and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"--{name}="):
            return argument.split("=", 1)[1]
    return None
