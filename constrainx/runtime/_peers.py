"""What processes that train together must have in common, checked before the first step.

Without these checks, peers with other settings train on, and peers without a common folder wait for
each other's files until a deadline of many minutes.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from constrainx.runtime._run_folder import RunError

# Seconds until a file that one process has written must be seen by the others.
SEEN_WITHIN = 10.0


def check_same_settings(settings: Mapping[str, Any]) -> None:
    """Raises, in every process, unless all of them have these settings.

    Raises:
        RunError: the first difference, and whose it is.
    """
    if jax.process_count() == 1:
        return
    mine = {name: json.loads(json.dumps(value, default=str)) for name, value in settings.items()}
    first, *others = (json.loads(text) for text in exchange(json.dumps(mine)))
    for number, other in enumerate(others, start=1):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            different = "; ".join(
                f"{name} is {other.get(name)!r} there and {first.get(name)!r} in process 0"
                for name in names[:3]
            )
            raise RunError(
                f"process {number} was started with other settings: {different}. Start all "
                "processes with the same command."
            )


def check_shared_folder(folder: pathlib.Path) -> None:
    """Raises, in every process, unless all can write to a folder and see each other's files.

    Raises:
        RunError: which process cannot, and why.
    """
    if jax.process_count() == 1:
        return
    token = exchange(secrets.token_hex(8))[0]
    files = [folder / f".peer-{token}-{number}" for number in range(jax.process_count())]
    mine = files[jax.process_index()]
    error = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mine.touch()
    except OSError as found:
        error = found.strerror or type(found).__name__
    try:
        for number, problem in enumerate(exchange(error)):
            if problem:
                raise RunError(
                    f"process {number} cannot write to the run folder {folder}: {problem}. All "
                    "processes write checkpoints there."
                )
        unseen = _wait_for_files(files)
        for number, missing in enumerate(json.loads(text) for text in exchange(json.dumps(unseen))):
            if missing:
                raise RunError(
                    f"process {number} does not see what process {missing[0]} writes to the run "
                    f"folder {folder}: put it on a file system that all processes share."
                )
    finally:
        with contextlib.suppress(OSError):
            mine.unlink()


def first_process_only(action: Callable[[], Any]) -> Any:
    """Runs an action in process 0 alone; returns its result there, and None elsewhere.

    Raises:
        RunError: the action has raised it. All processes raise it, so that none waits forever.
    """
    result, problem = None, ""
    if jax.process_index() == 0:
        try:
            result = action()
        except RunError as error:
            if jax.process_count() == 1:
                raise
            problem = str(error)
    if jax.process_count() > 1 and (said := exchange(problem)[0]):
        raise RunError(said)
    return result


def exchange(text: str) -> list[str]:
    """The texts of all processes, in their order."""
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array([data.size], np.int32)).reshape(-1)
    padded = np.zeros(max(int(lengths.max()), 1), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded).reshape(len(lengths), -1)
    return [
        np.asarray(row[:length], np.uint8).tobytes().decode()
        for row, length in zip(rows, lengths, strict=True)
    ]


def _wait_for_files(files: list[pathlib.Path]) -> list[int]:
    """The numbers of files that have not been seen in time; network file systems may lag."""
    end = time.monotonic() + SEEN_WITHIN
    while True:
        unseen = [number for number, file in enumerate(files) if not file.exists()]
        if not unseen or time.monotonic() > end:
            return unseen
        time.sleep(0.1)
