"""Continuing a run: the recipe of its folder, and a trainer that may log and save differently."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from constrainx.recipes._find import find
from constrainx.recipes._recipe import OVERSIGHT, Recipe
from constrainx.runtime import Callback, JsonLines, RunError, read_config
from constrainx.trainers import Trainer


def read_recipe(run: pathlib.Path) -> Recipe:
    """Reads the recipe that a run was started from.

    Raises:
        RunError: the folder has no run, or one that was started without a recipe.
    """
    config = read_config(run)
    if "recipe" not in config:
        raise RunError(
            f"{run} was not started from a recipe: build its Trainer in Python and call restore()."
        )
    return find(config["recipe"]).from_config(config)


def continue_run(
    run: pathlib.Path, recipe: Recipe, *, callbacks: Sequence[Callback] = ()
) -> Trainer:
    """Builds a trainer for a run that exists; call its `restore` and `fit`.

    The recipe may differ from that of the run in how often it logs and saves, in what it keeps, and
    in what it does about errors. The run's config.json stays what it was started with, and
    metrics.jsonl gets a line that says what differs from here on. Other differences are refused
    when the trainer starts.

    Args:
        run: its folder.
        recipe: to continue with.
        callbacks: of the trainer.
    """
    stored, wanted = read_config(run), json.loads(json.dumps(recipe.config))
    kept = {name: value for name, value in wanted.items() if name not in OVERSIGHT}
    config = {**kept, **{name: stored[name] for name in OVERSIGHT if name in stored}}
    changes = [
        f"{name} {wanted[name]} (was {config[name]})"
        for name in OVERSIGHT
        if name in config and config[name] != wanted[name]
    ]
    if changes:
        callbacks = [*callbacks, _NoteAtStart(run, f"continues with {', '.join(changes)}")]
    return recipe.trainer(run=run, config=config, callbacks=callbacks)


class _NoteAtStart(Callback):
    """Writes a line to the metrics of a run when it continues."""

    def __init__(self, run: pathlib.Path, message: str):
        self._lines, self._message = JsonLines(run / "metrics.jsonl"), message

    def on_start(self, trainer: Any, step: int) -> None:
        """Writes the line."""
        del trainer
        self._lines.on_event(step, self._message)
