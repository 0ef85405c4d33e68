"""What Orbax cannot cope with in a folder of checkpoints: some paths, and damaged metadata."""

from __future__ import annotations

import contextlib
import logging
import pathlib

import orbax.checkpoint as ocp

from constrainx.errors import ArgumentError
from constrainx.runtime._checkpoint_error import CheckpointError

log = logging.getLogger("constrainx")

# Orbax looks for files by patterns, and takes these for a part of one.
PATTERN_CHARACTERS = "[]*?\\"
# Timestamps, the kinds of items, and nothing that is needed to restore a checkpoint.
STEP_METADATA = "_CHECKPOINT_METADATA"


def has_checkpoints(folder: pathlib.Path) -> bool:
    """Whether a folder holds a complete checkpoint. While one is written, it has another name."""
    return bool(list_steps(folder))


def list_steps(folder: pathlib.Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, in order."""
    names = [child.name for child in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


def check_path(folder: pathlib.Path) -> None:
    """Raises if Orbax could not read again what it writes to this folder."""
    found = sorted({letter for letter in str(folder.absolute()) if letter in PATTERN_CHARACTERS})
    if found:
        raise ArgumentError(
            f"the path of a run must not contain {' '.join(found)}, because its checkpoints could "
            f"not be read again: {folder.absolute()}. Choose or rename the folder."
        )


def mend_step_metadata(folder: pathlib.Path) -> None:
    """Moves step metadata that Orbax cannot read out of its way.

    One such file in any checkpoint would keep Orbax from opening the folder, and so all of them
    from being read, although it can do without.
    """
    names = ocp.path.step.standard_name_format()
    for step in list_steps(folder):
        try:
            names.find_step(folder.absolute(), step).commit_timestamp  # noqa: B018
        except Exception as error:  # whatever JSON and Orbax's checks may raise
            path = folder / str(step) / STEP_METADATA
            try:
                # Another process may have been quicker.
                with contextlib.suppress(FileNotFoundError):
                    path.rename(path.with_name(f"{path.name}.damaged"))
            except OSError as failure:
                raise CheckpointError(
                    f"{path} is damaged and in the way of all checkpoints: remove it. It could not "
                    f"be renamed: {failure.strerror}."
                ) from error
            log.warning("%s was damaged, and is not needed: renamed", path)
