"""One run of a comparison: trained, continued, or used again if it is of the same code."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.text import Text

from constrainx.errors import UserError
from constrainx.recipes._build import build_trainer
from constrainx.recipes._recipe import OVERSIGHT, Recipe
from constrainx.recipes._resolve import RECORDED
from constrainx.recipes._result import read_result, write_failure, write_result
from constrainx.recipes._tables import join_lines
from constrainx.runtime import read_config
from constrainx.trainers import NonFiniteError

Reuse: TypeAlias = Literal["unchanged", "all"]


class ComparisonError(UserError, ValueError):
    """A comparison cannot be made like this."""


def train_or_reuse(
    folder: pathlib.Path,
    recipe: Recipe,
    label: str,
    console: Console,
    *,
    reuse: Reuse,
    may_fail: bool = False,
) -> dict[str, Any] | None:
    """The result of one run; None if it was asked to stop.

    Args:
        folder: of the run.
        recipe: what to train.
        label: what the console calls it.
        console: to print to if a run that exists plays a part.
        reuse: which runs to use again.
        may_fail: whether a run that is no longer finite gets a result without figures, instead of
            ending the comparison.
    """

    def say(what: str) -> None:
        text = Text(join_lines(f"{label}: {what}"))
        console.print(text, soft_wrap=True, highlight=False)

    def finish(*, resume: bool) -> dict[str, Any] | None:
        trainer = build_trainer(recipe, run=folder)
        if resume:
            trainer.restore(fallback=True, or_start=True)
        try:
            return write_result(folder, recipe, trainer.fit(on_signal="return"))
        except NonFiniteError as error:
            if not may_fail:
                raise
            say(f"failed: {error}")
            return write_failure(folder, recipe, step=trainer.step)

    if not (folder / "config.json").exists():
        return finish(resume=False)
    result = read_result(folder)
    stored = result.get("config", {}) if result else read_config(folder)
    if _drop_oversight(stored) != _drop_oversight(recipe.config):
        raise ComparisonError(
            f"{folder} has a run with other settings. Choose another folder with `--out`."
        )
    changed = _find_changed_code(stored, recipe)
    if changed and reuse == "unchanged":
        aside = _set_aside(folder)
        say(
            f"trains anew, because {changed} changed since; the old run is in {aside}. "
            "`--reuse all` uses such runs as they are."
        )
        return finish(resume=False)
    caveat = f", although {changed} changed since" if changed else ""
    if result is not None:
        say(f"reused the result of step {result['step']}{caveat}.")
        return result
    say(f"continued{caveat}.")
    return finish(resume=True)


def _drop_oversight(config: Mapping[str, Any]) -> dict[str, Any]:
    """What defines a result, apart from the code."""
    other = (*OVERSIGHT, *RECORDED)
    kept = {name: value for name, value in config.items() if name not in other}
    return json.loads(json.dumps(kept))


def _find_changed_code(stored: Mapping[str, Any], recipe: Recipe) -> str:
    """What of the code is not as it was when a run was trained, in words."""
    # A file that has only moved is the same code.
    before, now = stored.get("source", {}), recipe.config["source"]
    names = {"recipe": "the recipe's source", "constrainx": "constrainx"}
    changed = [words for name, words in names.items() if before.get(name) != now[name]]
    return f"{' and '.join(changed)} {'have' if len(changed) > 1 else 'has'}" if changed else ""


def _set_aside(folder: pathlib.Path) -> pathlib.Path:
    """Moves a run into the folder "earlier" next to it, under a name that is free."""
    earlier = folder.parent / "earlier"
    earlier.mkdir(exist_ok=True)
    number = 1
    while (target := earlier / f"{folder.name}-{number}").exists():
        number += 1
    return folder.rename(target)
