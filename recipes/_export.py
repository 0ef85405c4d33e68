"""Weights as a file that other programs read."""

from __future__ import annotations

import contextlib
import pathlib

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError

from constrainx.constraints import masks
from constrainx.errors import UserError
from constrainx.runtime import by_path


class ExportError(UserError, OSError):
    """A file of weights could not be written."""


def export_weights(model: nnx.Module, path: pathlib.Path, *, prune: bool = True) -> int:
    """Writes all parameters and statistics of a model to a ``.safetensors`` file.

    Args:
        model: any model.
        path: the file, which is written whole or not at all.
        prune: whether to set the weights that masks leave out to zero and drop the masks, instead
            of writing the probabilities, too.

    Returns:
        How many arrays were written.
    """
    from safetensors.flax import save_file

    if prune and masks.has_masks(model):
        model = masks.export(model)
    state = nnx.as_pure(nnx.state(model, nnx.Not(nnx.RngState)))
    arrays = {name: jax.numpy.asarray(np.asarray(leaf)) for name, leaf in by_path(state).items()}
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, part)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ExportError(f"{path} could not be written: {error}.") from error
    return len(arrays)
