"""The polished model of a run, in the run's folder."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from flax import nnx

from constrainx.polishing import Polished
from constrainx.recipes._export import export_weights
from constrainx.runtime import RunError, write_object

WEIGHTS, RECORD = "polished.safetensors", "polished.json"


def record_polished(
    folder: pathlib.Path,
    model: nnx.Module,
    polished: Polished,
    *,
    step: int,
    metrics: tuple[dict[str, float], dict[str, float]],
) -> pathlib.Path:
    """Writes the weights of a polished model, and what was done to it. Checkpoints stay.

    Args:
        folder: of the run.
        model: the polished model.
        polished: what was done to it.
        step: of the checkpoint that was polished.
        metrics: of the model before and after.

    Returns:
        The file with the weights.

    Raises:
        RunError: a file could not be written.
    """
    weights = folder / WEIGHTS
    export_weights(model, weights, prune=False)
    before, after = metrics
    record: dict[str, Any] = {"step": step, "before": before, "after": after}
    record |= json.loads(json.dumps(polished.as_record()))
    try:
        write_object(folder / RECORD, record)
    except OSError as error:
        raise RunError(
            f"{folder / RECORD} could not be written: {error.strerror}. The weights are in "
            f"{weights}."
        ) from error
    return weights
