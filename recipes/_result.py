"""How a run of a recipe ended, as it is kept in the run's folder."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax

from constrainx.recipes._recipe import Recipe
from constrainx.trainers import Ending, Result


def was_asked_to_stop(result: Result) -> bool:
    """Whether a signal ended the run before its last step, so that it can still continue."""
    return result.reason is Ending.ASKED_TO_STOP


def write_result(folder: pathlib.Path, recipe: Recipe, result: Result) -> dict[str, Any] | None:
    """Measures the trained model, draws it, and writes ``result.json``.

    Args:
        folder: of the run.
        recipe: which was run.
        result: of `Trainer.fit`.

    Returns:
        What was written; None if the run was asked to stop, and has no result yet.
    """
    if was_asked_to_stop(result):
        return None
    metrics = {**result.metrics, **recipe.measure(result.model)}
    record = {
        "config": json.loads(json.dumps(recipe.config)),
        "reason": result.reason,
        "step": result.step,
        "metrics": metrics,
        "seconds": result.seconds,
    }
    if jax.process_index() == 0:
        recipe.draw(result.model, folder / "picture.png")
        (folder / "result.json").write_text(json.dumps(record, indent=1) + "\n")
    return record
