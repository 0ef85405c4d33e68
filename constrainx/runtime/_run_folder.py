"""A run's folder: its config, its environment, its metrics, and a lock while it is in use."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import platform
import time
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from typing import Any

import jax

from constrainx.errors import UserError, suggest
from constrainx.runtime._json_files import read_object, write_object
from constrainx.runtime._orbax_files import has_checkpoints
from constrainx.runtime._revision import read_revision

PACKAGES = ("constrainx", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class RunError(UserError, RuntimeError):
    """A run cannot be started in this folder."""


def prepare_run_folder(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    *,
    resume_from: int | None = None,
    may_change: Collection[str] = (),
) -> list[str]:
    """Writes config and environment to a locked folder.

    Args:
        folder: of the run.
        config: its settings.
        resume_from: the step from which a run that is there already continues; None for a new run.
        may_change: names in ``config`` that may differ from what the run had so far. Its
            config.json then has the new values, and "changes", a list of what was before.

    Returns:
        What has changed, a phrase for each setting.

    Raises:
        RunError: the folder holds a run already, or one with another config.
    """
    path = folder / "config.json"
    config = json.loads(json.dumps(config, default=str))
    changes: list[str] = []
    if path.exists():
        if resume_from is None:
            raise RunError(
                f"{folder} holds a run already. Continue it with `constrainx resume {folder}`, or "
                "choose another folder with `--run FOLDER`."
            )
        stored = read_config(folder)
        noted = stored.pop("changes", [])
        # Somebody may have edited the file by hand.
        history = noted if isinstance(noted, list) else [noted]
        changed = _find_changes(folder, stored, config, may_change)
        if changed:
            note = {
                "step": resume_from,
                "time": _now(),
                "before": {name: stored.get(name) for name in changed},
                "after": {name: config.get(name) for name in changed},
            }
            _write(path, {**config, "changes": [*history, note]})
            changes = [_describe_change(name, note) for name in changed]
    else:
        if resume_from is None and has_checkpoints(folder / "checkpoints"):
            raise RunError(
                f"{folder} has no config.json, but checkpoints of a run, which must not be mixed "
                "with those of another. Choose another folder, or continue that run: build its "
                "Trainer in Python and call restore()."
            )
        _write(path, config)
    _write(folder / "environment.json", describe_environment())
    return changes


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """The settings that a run was started with."""
    path = folder / "config.json"
    try:
        return read_object(path)
    except FileNotFoundError as error:
        runs = sorted(found.parent for found in folder.glob("**/config.json"))
        hint = suggest(runs[0]) if runs else ""
        raise RunError(f"{folder} is not a run folder: it has no config.json.{hint}") from error
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} is damaged: {error}. The config is also in each checkpoint, in about/metadata."
        ) from error


def describe_environment() -> dict[str, Any]:
    """Versions, devices and the revision of the code."""
    return {
        "time": _now(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: metadata.version(name) for name in PACKAGES},
        "devices": [str(device) for device in jax.devices()],
        "device_kind": jax.devices()[0].device_kind,
        "processes": jax.process_count(),
        "git": read_revision(),
    }


@contextlib.contextmanager
def lock_run_folder(folder: pathlib.Path) -> Iterator[None]:
    """Creates the folder, and keeps other processes out while the block runs.

    The operating system releases the lock when the process ends, however it ends.

    Raises:
        RunError: another process uses the folder, or it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / "lock").open("a+")
    except OSError as error:
        raise RunError(
            f"the run folder {folder} cannot be written to: {error.strerror}. Choose another with "
            "`--run FOLDER`."
        ) from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise RunError(f"{folder} is in use by {owner}. Wait for it, or stop it.") from error
        # Who holds the lock is for the message above alone, and a full disk must not matter.
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()} on {platform.node()}".encode())
        yield


def _find_changes(
    folder: pathlib.Path,
    stored: Mapping[str, Any],
    given: Mapping[str, Any],
    may_change: Collection[str],
) -> list[str]:
    """The names that differ, if all of them may."""
    absent = "nothing"
    names = [
        name for name in dict.fromkeys([*given, *stored]) if stored.get(name) != given.get(name)
    ]
    refused = [
        f"{name} was {stored.get(name, absent)!r}, now {given.get(name, absent)!r}"
        for name in sorted(names)
        if name not in may_change
    ]
    if refused:
        raise RunError(
            f"the run in {folder} was started with other settings: {'; '.join(refused)}. Use "
            "those, or another folder."
        )
    return names


def _describe_change(name: str, note: Mapping[str, Any]) -> str:
    before, after = note["before"][name], note["after"][name]
    if isinstance(before, dict) and isinstance(after, dict):
        parts = [part for part in after if before.get(part) != after[part]]
        if name == "source":
            return f"another version of {' and '.join(parts)}"
        return ", ".join(f"{name}.{part} {after[part]} (was {before.get(part)})" for part in parts)
    return f"{name} {after} (was {before})"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def _write(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    try:
        write_object(path, content)
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error.strerror}. Nothing else is lost."
        ) from error
