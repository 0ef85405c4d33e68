"""Checkpoints, which Orbax writes atomically in the background, and which are read by name."""

from __future__ import annotations

import json
import logging
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from constrainx.runtime._checkpoint_error import CheckpointError, describe_error
from constrainx.runtime._keep import Keep, as_policy
from constrainx.runtime._manifest import ITEM, prepare_manifest
from constrainx.runtime._stored import Mode, StoredCheckpoints, rank
from constrainx.runtime._structure import by_path

log = logging.getLogger("constrainx")


class Checkpoints(StoredCheckpoints):
    """The checkpoints of a run that adds to them."""

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        keep: Keep = Keep(),
        metric: str | None = None,
        mode: Mode = "min",
    ):
        """Makes the folder, or looks into the one that is there.

        Args:
            folder: of the checkpoints.
            keep: which of them stay.
            metric: the one that says which checkpoint is best; None for none.
            mode: whether small or large is good.
        """
        self._ranks: dict[int, float] = {}
        super().__init__(
            folder,
            metric=metric,
            mode=mode,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=as_policy(keep, None if metric is None else self._ranks),
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,
                create=True,
            ),
        )
        self._begun: int | None = None
        self._has_failed = False
        if self._monitored is not None:
            self._ranks.update(self._rank_all(*self._monitored))

    def save(
        self, step: int, state: PyTree, *, about: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        """Starts to write a checkpoint; returns once the arrays are copied.

        Raises:
            CheckpointError: this save, or the one before in the background, has failed.
        """
        if step in self.steps:
            return
        # As text, as in config.json, because settings may hold paths and other objects.
        about = json.loads(
            json.dumps({**about, "step": step, "metrics": dict(metrics)}, default=str)
        )
        if self._monitored is not None:
            self._ranks[step] = rank(metrics, *self._monitored)
        self._begun = step
        arrays = by_path(state)
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(arrays),
                    about=ocp.args.JsonSave(about),
                    **{ITEM: prepare_manifest(arrays, about)},
                ),
                force=True,
            )
        except Exception as error:  # whatever the file system and Orbax may raise
            raise self._write_error(error) from error

    def wait(self) -> None:
        """Waits until everything is on disk.

        Raises:
            CheckpointError: a save in the background has failed.
        """
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._write_error(error) from error

    def set_aside_after(self, step: int) -> list[int]:
        """Moves checkpoints of later steps out of the way of a run that resumes from a step.

        They are kept in ``checkpoints/set-aside``, in case they are wanted again.

        Returns:
            The steps of the checkpoints that were moved.
        """
        later = [saved for saved in self.steps if saved > step]
        if not later:
            return later
        aside = self.folder / "set-aside"
        for saved in later:
            self._ranks.pop(saved, None)
            if jax.process_index() == 0:
                aside.mkdir(exist_ok=True)
                names = (f"{saved}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
                free = next(name for name in names if not (aside / name).exists())
                (self.folder / str(saved)).rename(aside / free)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("later checkpoints are set aside")
        self._manager.reload()
        return later

    def close(self) -> None:
        """Waits and releases threads. Errors of the last save are logged; `wait` raises them."""
        try:
            self._manager.close()
        except Exception as error:
            log.warning("%s", self._write_error(error))
        if self._has_failed:
            # Threads of a save that failed may have written on, and have ended now.
            self._remove_incomplete()

    def _remove_incomplete(self) -> None:
        """Removes incomplete files, which would keep a full disk full."""
        if jax.process_index() == 0:
            for part in self.folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(part, ignore_errors=True)

    def _write_error(self, error: Exception) -> CheckpointError:
        self._has_failed = True
        self._remove_incomplete()
        failure = CheckpointError(
            f"the checkpoint of step {self._begun} could not be written to {self.folder}: "
            f"{describe_error(error)}. Older checkpoints are intact."
        )
        failure.step = self._begun
        return failure
