"""A run on disk: restores its checkpoints, and opens its folder for writing."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import jax

from constrainx.runtime import (
    Callback,
    CheckpointError,
    Checkpoints,
    JsonLines,
    Restored,
    StoredCheckpoints,
    TensorBoard,
    check_shared_folder,
    first_process_only,
    has_checkpoints,
    lock_run_folder,
    prepare_run_folder,
)
from constrainx.trainers._settings import Monitor, RunFolder
from constrainx.trainers._state import Progress, State

WhichStep: TypeAlias = int | Literal["last", "best"]


@dataclasses.dataclass(frozen=True)
class OpenRun:
    """A run folder that is locked and ready to be written.

    Attributes:
        checkpoints: where to save.
        set_aside: steps of checkpoints that lay ahead of the one the run resumes from.
        changes: the settings that differ from those that the run had so far, a phrase for each.
        writers: callbacks that write its metrics; empty on all processes but the first.
    """

    checkpoints: Checkpoints
    set_aside: Sequence[int]
    changes: Sequence[str]
    writers: Sequence[Callback]


@contextlib.contextmanager
def open_run(
    folder: RunFolder, monitor: Monitor | None, *, resume_from: int | None
) -> Iterator[OpenRun]:
    """Locks and prepares a folder while the block runs.

    Args:
        folder: what to open.
        monitor: says which checkpoints are best.
        resume_from: the step of the checkpoint that was restored from this folder; None for a new
            run.

    Raises:
        RunError: the folder is in use, holds another run, or cannot be written to.
    """
    path = pathlib.Path(folder.path)
    is_first_process = jax.process_index() == 0
    with contextlib.ExitStack() as stack:

        def prepare() -> list[str]:
            stack.enter_context(lock_run_folder(path))
            return prepare_run_folder(
                path, folder.config, resume_from=resume_from, may_change=folder.may_change
            )

        check_shared_folder(path)
        changes = first_process_only(prepare) or []
        checkpoints = Checkpoints(
            path / "checkpoints", keep=folder.keep, **_describe_monitor(monitor)
        )
        stack.callback(checkpoints.close)
        later = [] if resume_from is None else checkpoints.set_aside_after(resume_from)
        writers: list[Callback] = []
        if is_first_process:
            writers = [JsonLines(path / "metrics.jsonl"), TensorBoard(path / "tensorboard")]
        yield OpenRun(checkpoints, later, changes, writers)


def can_restore(folder: RunFolder) -> bool:
    """Whether a run has a complete checkpoint."""
    return has_checkpoints(pathlib.Path(folder.path) / "checkpoints")


def restore_progress(
    folder: RunFolder,
    monitor: Monitor | None,
    step: WhichStep,
    like: State,
    *,
    fallback: bool,
    strict: bool,
    keep_hyperparameters: bool,
) -> tuple[Progress, Restored]:
    """Reads a checkpoint.

    Args:
        folder: of the run.
        monitor: says which checkpoint is best.
        step: which one.
        like: a state of the same structure, on the devices that the arrays go to.
        fallback: whether to try earlier checkpoints if this one is damaged.
        strict: whether all arrays must match.
        keep_hyperparameters: whether constants of `optax.inject_hyperparams` stay as they are.

    Returns:
        The progress, and all that was read.

    Raises:
        CheckpointError: there is none, it is damaged, or it belongs to another model.
    """
    path = pathlib.Path(folder.path)
    if not (path / "checkpoints").is_dir():
        raise CheckpointError(f"there are no checkpoints in {path}: nothing to restore.")
    checkpoints = StoredCheckpoints(path / "checkpoints", **_describe_monitor(monitor))
    try:
        wanted = checkpoints.find(step)
        earlier = [saved for saved in reversed(checkpoints.steps) if saved < wanted]
        candidates = [wanted, *(earlier if fallback else [])]
        found = checkpoints.restore_first_readable(
            candidates, like, strict=strict, keep_hyperparameters=keep_hyperparameters
        )
    finally:
        checkpoints.close()
    about = found.about
    progress = Progress(
        state=found.state,
        best=about.get("best"),
        without_best=about.get("without_best", 0),
        seconds=about.get("seconds", 0.0),
    )
    return progress, found


def _describe_monitor(monitor: Monitor | None) -> dict[str, Any]:
    return {"metric": monitor.metric, "mode": monitor.mode} if monitor else {}
