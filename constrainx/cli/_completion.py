"""`constrainx completion`: a script that lets a shell complete commands, recipes and options."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

import tyro

from constrainx.cli._arguments import list_flags
from constrainx.cli._command import PlainCommand


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion(PlainCommand):
    """Print a completion script for the shell: source <(constrainx completion bash).

    Attributes:
        shell: which shell.
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh"]]

    def execute(self) -> None:
        """Prints the script."""
        from constrainx.cli._main import COMMANDS, load_command
        from constrainx.recipes import all_recipes

        commands = {name: load_command(name) for name in COMMANDS}
        lines = _write_function(
            options={name: command.list_flags() for name, command in commands.items()},
            with_recipe=[name for name, command in commands.items() if command.takes_recipe],
            first={name: command.first_words for name, command in commands.items()},
            recipes={name: list_flags(recipe) for name, recipe in all_recipes().items()},
        )
        if self.shell == "zsh":
            lines = ["autoload -U +X bashcompinit && bashcompinit", *lines]
        sys.stdout.write("\n".join(lines) + "\n")


def _write_function(
    *,
    options: Mapping[str, Sequence[str]],
    with_recipe: Sequence[str],
    first: Mapping[str, Sequence[str]],
    recipes: Mapping[str, Sequence[str]],
) -> list[str]:
    """A function in bash, which zsh runs as well.

    Args:
        options: the options of each command.
        with_recipe: the commands whose first argument is a recipe.
        first: the words that can stand before the recipe, for commands that have such.
        recipes: the options of each recipe.
    """
    return [
        "_constrainx() {",
        '  local word="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" words="" at=2',
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f'    COMPREPLY=($(compgen -W "{" ".join(options)}" -- "$word")); return',
        "  fi",
        '  case "$command" in',
        *(f'    {name}) words="{" ".join(said)}"; at=3 ;;' for name, said in first.items() if said),
        "  esac",
        '  if [ "$COMP_CWORD" -lt "$at" ]; then',
        '    COMPREPLY=($(compgen -W "$words" -- "$word")); return',
        "  fi",
        f'  local with_recipe=" {" ".join(with_recipe)} "',
        '  if [ "$COMP_CWORD" -eq "$at" ] && [[ "$with_recipe" == *" $command "* ]]; then',
        f'    COMPREPLY=($(compgen -W "{" ".join(recipes)}" -- "$word") $(compgen -f -- "$word"))',
        "    return",
        "  fi",
        '  if [[ "$word" != -* ]]; then COMPREPLY=($(compgen -f -- "$word")); return; fi',
        '  words=""',
        '  case "${COMP_WORDS[$at]}" in',
        *(f'    {name}) words="{" ".join(flags)}" ;;' for name, flags in recipes.items()),
        "  esac",
        '  case "$command" in',
        *(f'    {name}) words="$words {" ".join(flags)}" ;;' for name, flags in options.items()),
        "  esac",
        '  COMPREPLY=($(compgen -W "$words --help --traceback" -- "$word"))',
        "}",
        "complete -F _constrainx constrainx",
    ]
