"""Weights as a file that other programs read."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import numpy as np
from flax import nnx
from safetensors import SafetensorError

from constrainx.constraints import masks
from constrainx.errors import ArgumentError, UserError
from constrainx.models.published import Layout, name_arrays
from constrainx.runtime import by_path


class ExportError(UserError, OSError):
    """A file of weights could not be written."""


def export_weights(
    model: nnx.Module, path: pathlib.Path, *, prune: bool = True, layout: Layout | None = None
) -> int:
    """Writes all parameters and statistics of a model to a ``.safetensors`` file.

    Args:
        model: any model; a `ResNet` or `Swin` for a layout other than our own.
        path: the file, which is written whole or not at all.
        prune: whether to set the weights that masks leave out to zero and drop the masks, instead
            of writing the probabilities, too.
        layout: whose names and axes to use, such as "timm"; those of the model itself if None.

    Returns:
        How many arrays were written.

    Raises:
        ArgumentError: masks are to be kept in a layout that has no place for them.
        ArgumentTypeError: the model has no such layout.
        ExportError: the file could not be written.
    """
    from safetensors.numpy import save_file

    if layout is not None and not prune and masks.has_masks(model):
        raise ArgumentError(
            f"the layout of {layout} has no place for masks: prune them, or leave out the layout."
        )
    if prune and masks.has_masks(model):
        model = masks.export(model)
    found: dict[str, Any]
    if layout is None:
        found = by_path(nnx.as_pure(nnx.state(model, nnx.Not(nnx.RngState))))
    else:
        found = name_arrays(model, layout)
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in found.items()}
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, part, metadata=None if layout is None else {"format": "pt"})
        part.replace(path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ExportError(f"{path} could not be written: {error}.") from error
    return len(arrays)
