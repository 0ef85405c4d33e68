"""Finding prepared data sets on the disk."""

from __future__ import annotations

import difflib
import os
import re
from typing import Any

from constrainx.errors import ArgumentError, MissingPackageError, UserError


class DataNotFoundError(UserError, FileNotFoundError):
    """A data set has not been prepared where it was looked for."""


def source(name: str, split: str, data_dir: str | os.PathLike[str] | None) -> Any:
    """The examples of a prepared data set, by random access."""
    library = tensorflow_datasets()
    directory = data_directory(data_dir)
    try:
        builder = library.builder(name, data_dir=directory)
    except library.core.registered.DatasetNotFoundError:
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
    """Where data sets are looked for."""
    chosen = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return os.path.expanduser(os.fspath(chosen))


def tensorflow_datasets() -> Any:
    """The library, which is an optional dependency."""
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise MissingPackageError(
            "data sets of TFDS need the optional packages of `constrainx[data]`, and importing "
            f"tensorflow_datasets failed: {error}. Install them with "
            "`pip install 'constrainx[data]'`."
        ) from error
    return tensorflow_datasets


def _check_split(split: str, *, name: str, known: list[str]) -> None:
    for part in split.split("+"):
        wanted = re.sub(r"\[.*", "", part).strip()
        if wanted not in (*known, "all"):
            near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.3)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ArgumentError(
                f"`split` must name splits of {name}, which has {', '.join(known)}; got "
                f"{split!r}.{hint}"
            )
