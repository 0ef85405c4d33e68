"""The manifest of a checkpoint: a digest of every array, and of what was recorded beside them.

It is a part of the checkpoint, so both are there or neither is. Each process writes a file about
the parts of arrays that it holds, from the copies on the host that Orbax writes, too, and in the
background.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import future

from constrainx.runtime._digest import MODULUS, Part, digest_parts, parts_held_here
from constrainx.runtime._json_files import read_object

ITEM = "manifest"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What the arrays of a checkpoint must be.

    Attributes:
        arrays: shape, dtype and digest by the path of the array.
        about: the digest of what was recorded beside them.
    """

    arrays: Mapping[str, tuple[tuple[int, ...], str, int]]
    about: str


class ManifestHandler(ocp.AsyncCheckpointHandler):
    """Lets Orbax write manifests. They are read without it, by `read_manifest`."""

    async def async_save(self, directory: Any, args: ManifestSave) -> list[future.Future]:
        """Returns at once; digests are computed in the background."""
        write = self._write(directory, args)
        return [future.CommitFutureAwaitingContractedSignals(write, name="manifest")]

    async def _write(self, directory: Any, args: ManifestSave) -> None:
        content = {
            "processes": jax.process_count(),
            "about": args.about,
            "arrays": {
                path: {
                    "shape": list(shape),
                    "dtype": dtype,
                    "digest": f"{digest_parts(shape, parts):016x}",
                }
                for path, (shape, dtype, parts) in args.arrays.items()
            },
        }
        args.arrays.clear()  # or the copies would stay in memory until the next save
        path = directory / f"process-{jax.process_index()}.json"
        path.write_text(json.dumps({**content, "checksum": digest_object(content)}))

    def save(self, directory: Any, *args: Any, **options: Any) -> None:
        """Never called: Orbax only requires that it exists."""
        raise NotImplementedError

    def restore(self, directory: Any, *args: Any, **options: Any) -> None:
        """Never called: Orbax only requires that it exists; see `read_manifest`."""
        raise NotImplementedError


@ocp.args.register_with_handler(ManifestHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class ManifestSave(ocp.args.CheckpointArgs):
    """What the manifest is about: shape, dtype and the parts that are here, by path."""

    arrays: dict[str, tuple[tuple[int, ...], str, list[Part]]]
    about: str


def prepare_manifest(arrays: Mapping[str, jax.Array], about: Mapping[str, Any]) -> ManifestSave:
    """Keeps the current content of the arrays, which training may donate afterwards."""
    return ManifestSave(
        {
            path: (tuple(array.shape), str(array.dtype), parts_held_here(array))
            for path, array in arrays.items()
        },
        digest_object(about),
    )


def read_manifest(folder: pathlib.Path) -> Manifest | None:
    """Reads the manifest of the checkpoint in a folder; None if it was written without one.

    Raises:
        OSError: a file of it is missing or cannot be read.
        ValueError: a file of it is damaged.
    """
    files = sorted((folder / ITEM).glob("process-*.json")) if (folder / ITEM).is_dir() else []
    if not files:
        return None
    sums: dict[str, tuple[tuple[int, ...], str, int]] = {}
    about = None
    for file in files:
        content = read_object(file)
        if content.pop("checksum", None) != digest_object(content):
            raise ValueError(f"{ITEM}/{file.name} is not what was written")
        # Processes differ in what they would record, such as their clocks. Orbax writes what the
        # first one says, whose file is the first.
        about = content["about"] if about is None else about
        for path, entry in content["arrays"].items():
            before = sums.get(path, ((), "", 0))[2]
            total = (before + int(entry["digest"], 16)) % MODULUS
            sums[path] = tuple(entry["shape"]), entry["dtype"], total
    if len(files) != content["processes"]:
        raise FileNotFoundError(
            f"{ITEM} has {len(files)} of the files of {content['processes']} processes"
        )
    assert about is not None
    return Manifest(sums, about)


def find_damaged(manifest: Manifest, arrays: Mapping[str, Any]) -> list[str]:
    """The paths of arrays that are not what was saved. All processes get the same answer."""
    sums = [digest_parts(array.shape, parts_held_here(array)) for array in arrays.values()]
    if jax.process_count() > 1:
        halves = np.array([divmod(one, 2**32) for one in sums], np.uint32)
        gathered = multihost_utils.process_allgather(halves).astype(object)
        sums = [int(high) * 2**32 + int(low) for high, low in gathered.sum(axis=0)]
    return [
        path
        for path, total in zip(arrays, sums, strict=True)
        if manifest.arrays[path] != _entry(arrays[path], total)
    ]


def _entry(array: Any, total: int) -> tuple[tuple[int, ...], str, int]:
    return tuple(array.shape), str(array.dtype), total % MODULUS


def digest_object(content: Mapping[str, Any]) -> str:
    """A digest of what can be written as JSON."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
