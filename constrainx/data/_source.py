"""Finds prepared data sets on disk."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from constrainx.errors import ArgumentError, MissingPackageError, UserError, did_you_mean


class DataNotFoundError(UserError, FileNotFoundError):
    """A data set has not been prepared in the directory that was searched."""


class DamagedDataError(UserError, RuntimeError):
    """The files of a data set are incomplete or cannot be read."""


def open_source(name: str, split: str, data_dir: str | os.PathLike[str] | None) -> Any:
    """The examples of a prepared data set, by random access.

    Raises:
        DataNotFoundError: it is not there.
        DamagedDataError: it is, but was not written to the end, or its files are damaged.
    """
    library = import_tensorflow_datasets()
    directory = data_directory(data_dir)
    try:
        builder = library.builder(name, data_dir=directory)
    except library.core.DatasetNotFoundError:
        builder = None
    except Exception as error:
        # Parsers of JSON and of protocol buffers raise all kinds of errors for an incomplete file.
        folder = os.path.join(directory, re.split(r"[/:]", name)[0])
        raise DamagedDataError(describe_damage(name, folder, error)) from error
    if builder is None or not builder.info.splits:
        raise DataNotFoundError(
            f"the data set {name!r} is not in {directory}. Prepare it with "
            f"`constrainx data prepare {name}`, or point `data_dir` or the environment variable "
            "TFDS_DATA_DIR to where it is."
        )
    _check_split(split, name=name, known=list(builder.info.splits))
    try:
        source = builder.as_data_source(split)
        _check_files(builder, split)
        return Examples(source, len(source), name, str(builder.data_path), split)
    except NotImplementedError as error:
        raise ArgumentError(
            f"the data set {name!r} in {builder.data_path} is stored as "
            f"{builder.info.file_format.value}, which has no random access. Delete that directory "
            f"and run `constrainx data prepare {name}`, which stores array_record."
        ) from error
    except Exception as error:
        raise DamagedDataError(describe_damage(name, builder.data_path, error)) from error


def _check_files(builder: Any, split: str) -> None:
    """Raises now if a file is missing or empty, which TFDS notices only when it reads the file."""
    wanted = [re.sub(r"\[.*", "", part).strip() for part in split.split("+")]
    for name, info in builder.info.splits.items():
        if name not in wanted and "all" not in wanted:
            continue
        for path in info.filepaths:
            if not os.path.isfile(path) or os.path.getsize(path) == 0:
                raise FileNotFoundError(f"{os.path.basename(path)} is missing or empty")


@dataclasses.dataclass(frozen=True)
class Examples:
    """Examples by their number; one that cannot be read is a `DamagedDataError`.

    Attributes:
        source: from TFDS.
        count: how many there are.
        name: of the data set.
        folder: where it is.
        split: which part of it.
    """

    source: Any = dataclasses.field(repr=False)
    count: int
    name: str
    folder: str
    split: str

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.source[index]
        except Exception as error:
            what = f"example {index} of {self.split!r}"
            message = describe_damage(self.name, self.folder, error, what=what)
            raise DamagedDataError(message) from error


def describe_damage(name: str, folder: Any, error: Exception, *, what: str = "it") -> str:
    """What is wrong with the files of a data set, and how to fix it, in a sentence or two."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    reason = reason if len(reason) <= 200 else f"{reason[:200]}…"
    return (
        f"the data set {name!r} in {folder} is incomplete or damaged: {what} cannot be read "
        f"({reason.rstrip('.')}). Delete that directory and run `constrainx data prepare {name}` "
        "again."
    )


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
