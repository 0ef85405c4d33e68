"""How a run of a recipe ended, as it is kept in the run's folder."""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from constrainx.recipes._recipe import Recipe
from constrainx.runtime import RunError, read_object, write_object
from constrainx.trainers import Ending, Result

log = logging.getLogger("constrainx")


def was_asked_to_stop(result: Result) -> bool:
    """Whether a signal ended the run before its last step, so that it can still continue."""
    return result.reason is Ending.ASKED_TO_STOP


def write_result(folder: pathlib.Path, recipe: Recipe, result: Result) -> dict[str, Any] | None:
    """Measures the trained model, draws it, and writes ``result.json``.

    A run that was asked to stop leaves the metrics of its last evaluation, and what stopped it:
    there may be little time, and the model is not done.

    Args:
        folder: of the run.
        recipe: which was run.
        result: of `Trainer.fit`.

    Returns:
        What was written; None if the run was asked to stop, and can continue.
    """
    is_done = not was_asked_to_stop(result)
    record = {
        "config": json.loads(json.dumps(recipe.config)),
        "reason": result.reason,
        "step": result.step,
        "metrics": {**result.metrics, **(recipe.measure(result.model) if is_done else {})},
        "seconds": result.seconds,
        **({} if result.signal is None else {"signal": result.signal}),
    }
    if jax.process_index() == 0:
        record |= _keep_certificate(folder, record)
        if is_done:
            _draw(recipe, result.model, folder / "picture.png")
        try:
            write_object(folder / "result.json", record)
        except OSError as error:
            raise RunError(
                f"{folder / 'result.json'} could not be written: {error.strerror}. "
                f"{_describe_kept(folder, result)}"
            ) from error
    return record if is_done else None


def write_failure(folder: pathlib.Path, recipe: Recipe, *, step: int) -> dict[str, Any]:
    """Writes the result of a run that did not stay finite: no figures, and nothing to continue."""
    record = {
        "config": json.loads(json.dumps(recipe.config)),
        "reason": "failed",
        "step": step,
        "metrics": {},
        "seconds": 0.0,
    }
    write_object(folder / "result.json", record)
    return record


def _keep_certificate(folder: pathlib.Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """The certificate in the folder, if no step was taken since, as in `resume` of a finished run.

    Steps take time, so a run with the same step and the same seconds is the one that was certified.
    """
    before = read_result(folder) or {}
    is_same = all(before.get(name) == record[name] for name in ("step", "seconds"))
    return {"certificate": before["certificate"]} if is_same and "certificate" in before else {}


def _describe_kept(folder: pathlib.Path, result: Result) -> str:
    """What is left of a run without a result: a disk that is full for it may have been before."""
    resume = f"`constrainx resume {folder}`"
    if not result.unsaved:
        return f"The checkpoints are safe; make room and write it by {resume}."
    steps = ", ".join(map(str, result.unsaved))
    if result.saved is None:
        return f"No checkpoint was saved, either, of steps {steps}: make room and train again."
    return (
        f"Nor could the checkpoints of steps {steps}: make room and continue from step "
        f"{result.saved} by {resume}."
    )


def _draw(recipe: Recipe, model: Any, path: pathlib.Path) -> None:
    """Draws the model. A picture that does not fit on the disk must not cost the result."""
    try:
        recipe.draw(model, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        log.warning("%s could not be written: %s", path, error.strerror or error)


def read_result(folder: pathlib.Path) -> dict[str, Any] | None:
    """The result of a run that has come to its end; None for one that can continue.

    A file that a crash cut off counts as none: the run writes it again.
    """
    try:
        record = read_object(folder / "result.json")
    except (FileNotFoundError, ValueError):
        return None
    return None if record.get("reason") == Ending.ASKED_TO_STOP else record
