"""Prepares data sets for reading, and lists those that are prepared."""

from __future__ import annotations

import logging
import os
import pathlib
import re
from typing import Any, NamedTuple

from constrainx.data._source import (
    data_directory,
    describe_damage,
    import_tensorflow_datasets,
)
from constrainx.errors import ArgumentError, UserError, did_you_mean

log = logging.getLogger("constrainx")

# Suggested first for an unknown name.
_FAMILIAR = ("fashion_mnist", "mnist", "cifar10", "svhn_cropped")


class PreparationError(UserError, RuntimeError):
    """A data set could not be prepared."""


class Prepared(NamedTuple):
    """A data set that is ready to be read.

    Attributes:
        name: as `tfds` takes it.
        splits: the number of examples in each split.
        bytes: its size on disk.
        path: the directory of its version.
    """

    name: str
    splits: dict[str, int]
    bytes: int
    path: pathlib.Path


def prepare(name: str, data_dir: str | os.PathLike[str] | None = None) -> Prepared:
    """Downloads a data set and stores it for random access, unless it is there already.

    Args:
        name: as TFDS spells it.
        data_dir: where to store it; by default the environment variable ``TFDS_DATA_DIR``, or else
            ``~/tensorflow_datasets``.

    Raises:
        ValueError: if TFDS knows no data set of this name.
        PreparationError: if it could not be downloaded or stored; the message says what to do.
    """
    library = import_tensorflow_datasets()
    directory = data_directory(data_dir)
    try:
        builder = library.builder(name, data_dir=directory)
    except library.core.DatasetNotFoundError as error:
        raise ArgumentError(_explain_unknown(name, library)) from error
    except Exception as error:
        folder = os.path.join(directory, re.split(r"[/:]", name)[0])
        raise PreparationError(describe_damage(name, folder, error)) from error
    try:
        builder.download_and_prepare(file_format="array_record")
    except ImportError as error:
        package = (error.name or "tensorflow").partition(".")[0]
        raise PreparationError(
            f"preparing {name} needs the package {package}, which could not be imported ({error}). "
            f"Run `pip install {package}` and try again; reading needs no TensorFlow, so a "
            f"separate environment will do. {_manual_route(name, directory)}"
        ) from error
    except Exception as error:
        raise PreparationError(
            f"preparing {name} failed with {type(error).__name__}: {error}. If this machine cannot "
            f"reach the data set's home, prepare it on one that can, with `constrainx data prepare "
            f"{name}`. {_manual_route(name, directory)}"
        ) from error
    if builder.info.file_format.value != "array_record":
        raise PreparationError(
            f"{name} was stored as {builder.info.file_format.value} before, in "
            f"{builder.data_path}, which has no random access. Delete that directory and run "
            f"`constrainx data prepare {name}` again."
        )
    return _describe(builder)


def list_prepared(data_dir: str | os.PathLike[str] | None = None) -> list[Prepared]:
    """The data sets that are ready to be read, sorted by name.

    One that cannot be read is left out, with a warning.

    Args:
        data_dir: where to look; by default the environment variable ``TFDS_DATA_DIR``, or else
            ``~/tensorflow_datasets``.
    """
    library = import_tensorflow_datasets()
    directory = pathlib.Path(data_directory(data_dir))
    # NAME/VERSION or NAME/CONFIG/VERSION; directories that are being written have longer names.
    found = [
        info.parent
        for pattern in ("*/*/dataset_info.json", "*/*/*/dataset_info.json")
        for info in directory.glob(pattern)
        if re.fullmatch(r"\d+\.\d+\.\d+", info.parent.name)
    ]
    prepared = []
    for path in found:
        try:
            prepared.append(_describe(library.builder_from_directory(path)))
        except Exception as error:
            log.warning("%s", describe_damage(path.relative_to(directory).parts[0], path, error))
    return sorted(prepared)


def _describe(builder: Any) -> Prepared:
    info = builder.info
    config = f"/{info.config_name}" if info.config_name else ""
    return Prepared(
        name=f"{info.name}{config}",
        splits={name: split.num_examples for name, split in info.splits.items()},
        bytes=int(info.dataset_size),
        path=pathlib.Path(info.data_dir),
    )


def _explain_unknown(name: str, library: Any) -> str:
    # Listing community data sets as well would need the network.
    known = library.list_builders(with_community_datasets=False)
    wanted = re.split(r"[/:]", name)[0]
    hint = did_you_mean(wanted, [*_FAMILIAR, *known], cutoff=0.5)
    return (
        f"`name` must be a data set of TFDS, such as {', '.join(_FAMILIAR)}; got {name!r}.{hint} "
        "All of them: https://www.tensorflow.org/datasets/catalog/overview"
    )


def _manual_route(name: str, directory: str) -> str:
    return (
        f"Or copy a directory that TFDS wrote elsewhere in the format array_record to "
        f"{os.path.join(directory, re.split(r'[/:]', name)[0])}{os.sep}, so that it holds "
        "VERSION/dataset_info.json, and read it from there."
    )
