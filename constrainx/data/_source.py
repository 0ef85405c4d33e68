"""Finds prepared data sets on disk."""

from __future__ import annotations

import os
import re
from typing import Any

from constrainx.errors import ArgumentError, MissingPackageError, UserError, did_you_mean


class DataNotFoundError(UserError, FileNotFoundError):
    """A data set has not been prepared in the directory that was searched."""


def open_source(name: str, split: str, data_dir: str | os.PathLike[str] | None) -> Any:
    """The examples of a prepared data set, by random access."""
    library = import_tensorflow_datasets()
    directory = data_directory(data_dir)
    try:
        builder = library.builder(name, data_dir=directory)
    except library.core.DatasetNotFoundError:
        builder = None
    if builder is None or not builder.info.splits:
        raise DataNotFoundError(
            f"the data set {name!r} is not in {directory}. Prepare it with "
            f"`constrainx data prepare {name}`, or point `data_dir` or the environment variable "
            "TFDS_DATA_DIR to where it is."
        )
    _check_split(split, name=name, known=list(builder.info.splits))
    try:
        return builder.as_data_source(split)
    except NotImplementedError as error:
        raise ArgumentError(
            f"the data set {name!r} in {builder.data_path} is stored as "
            f"{builder.info.file_format.value}, which has no random access. Delete that directory "
            f"and run `constrainx data prepare {name}`, which stores array_record."
        ) from error


def data_directory(data_dir: str | os.PathLike[str] | None) -> str:
    """The directory in which data sets are looked for."""
    chosen = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return os.path.expanduser(os.fspath(chosen))


def import_tensorflow_datasets() -> Any:
    """Imports an optional dependency, or says how to install it."""
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise MissingPackageError(
            f"data sets of TFDS need tensorflow_datasets, and importing it failed: {error}. Run "
            "`pip install 'constrainx[data]'`."
        ) from error
    return tensorflow_datasets


def _check_split(split: str, *, name: str, known: list[str]) -> None:
    for part in split.split("+"):
        wanted = re.sub(r"\[.*", "", part).strip()
        if wanted not in (*known, "all"):
            raise ArgumentError(
                f"`split` must name splits of {name}, which has {', '.join(known)}; got "
                f"{split!r}.{did_you_mean(wanted, known)}"
            )
