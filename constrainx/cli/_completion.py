"""Completion for the shell: commands, recipes, and the fields of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from constrainx.recipes import Recipe, all_recipes

Shell = Literal["bash", "zsh"]
TAKES_RECIPE = ("train", "validate", "compare", "cp")


def script(shell: Shell, *, commands: Sequence[str], options: Mapping[str, Sequence[str]]) -> str:
    """A script to source: ``source <(constrainx completion bash)``.

    Args:
        shell: bash or zsh, which runs the same script.
        commands: of the command line.
        options: flags of its commands, besides the recipe's fields.
    """
    recipes = all_recipes()
    cases = [
        f'    {name}) words="{" ".join(_flags(recipe))}" ;;' for name, recipe in recipes.items()
    ]
    extra = [f'    {name}) words="$words {" ".join(flags)}" ;;' for name, flags in options.items()]
    lines = [
        "_constrainx() {",
        '  local word="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" words=""',
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f'    COMPREPLY=($(compgen -W "{" ".join(commands)}" -- "$word")); return',
        "  fi",
        f'  local with_recipe=" {" ".join(TAKES_RECIPE)} "',
        '  if [ "$COMP_CWORD" -eq 2 ] && [[ "$with_recipe" == *" $command "* ]]; then',
        f'    COMPREPLY=($(compgen -W "{" ".join(recipes)}" -- "$word") $(compgen -f -- "$word"))',
        "    return",
        "  fi",
        '  if [[ "$word" != -* ]]; then COMPREPLY=($(compgen -f -- "$word")); return; fi',
        '  case "${COMP_WORDS[2]}" in',
        *cases,
        "  esac",
        '  case "$command" in',
        *extra,
        "  esac",
        '  COMPREPLY=($(compgen -W "$words --help" -- "$word"))',
        "}",
        "complete -F _constrainx constrainx",
    ]
    if shell == "zsh":
        lines = ["autoload -U +X bashcompinit && bashcompinit", *lines]
    return "\n".join(lines) + "\n"


def _flags(recipe: type[Recipe]) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name in recipe.field_names()]
