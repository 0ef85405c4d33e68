"""Reads the checkpoints of a run: lists them, restores them, and compares their digests."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from constrainx.errors import ArgumentError
from constrainx.runtime._checkpoint_error import CheckpointError, describe_error
from constrainx.runtime._json_files import read_object
from constrainx.runtime._manifest import (
    ITEM,
    Manifest,
    ManifestHandler,
    digest_object,
    find_damaged,
    read_manifest,
)
from constrainx.runtime._orbax_files import check_path, mend_step_metadata
from constrainx.runtime._structure import (
    by_path,
    compare,
    constant_hyperparameters,
    describe_paths,
    initial_value,
)

log = logging.getLogger("constrainx")

Mode: TypeAlias = Literal["min", "max"]
# How much `verify` reads at a time.
CHUNK = 2**30


class OtherModelError(CheckpointError):
    """A checkpoint is good, but of another model or optimizer."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was read.

    Attributes:
        state: the arrays.
        about: what was recorded with them.
        notes: sentences about what was not restored as it is, or could not be checked.
    """

    state: PyTree
    about: dict[str, Any]
    notes: list[str]


class StoredCheckpoints:
    """The checkpoints of one run, to be read.

    Arrays are stored under their path in the state. A state that does not match can then be
    refused with the names of what is missing.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        metric: str | None = None,
        mode: Mode = "min",
        options: ocp.CheckpointManagerOptions | None = None,
    ):
        """Looks into a folder.

        Args:
            folder: of the checkpoints.
            metric: the one that says which checkpoint is best; the recorded one by default.
            mode: whether small or large is good.
            options: for Orbax; to read and change nothing by default.
        """
        check_path(folder)
        mend_step_metadata(folder)
        self.folder = folder
        self._monitored = None if metric is None else (metric, mode)
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=options or ocp.CheckpointManagerOptions(create=False),
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(),
                "about": ocp.JsonCheckpointHandler(),
                ITEM: ManifestHandler(),
            },
        )

    def close(self) -> None:
        """Releases threads."""
        self._manager.close()

    def _rank_all(self, metric: str, mode: Mode) -> dict[int, float]:
        """Ranks by step. A checkpoint that cannot be read has none, and is never the best."""
        ranks = {}
        for step in self.steps:
            with contextlib.suppress(CheckpointError):
                ranks[step] = rank(self.about(step).get("metrics"), metric, mode)
        return ranks

    @property
    def steps(self) -> list[int]:
        """The steps that were saved completely, in order."""
        return sorted(self._manager.all_steps())

    @property
    def latest(self) -> int | None:
        """The step of the newest checkpoint, or None."""
        return max(self.steps, default=None)

    def find(self, step: int | Literal["last", "best"]) -> int:
        """The step that a number, "last" or "best" stands for.

        Raises:
            CheckpointError: there is no complete checkpoint, or none is known to be the best.
        """
        if isinstance(step, str) and step not in ("last", "best"):
            raise ArgumentError(
                f"`restore(step=...)` must be a number, 'last' or 'best', got {step!r}."
            )
        if not isinstance(step, str):
            return step
        if self.latest is None:
            raise CheckpointError(f"{self.folder.parent} has no complete checkpoint.")
        # Only "best" reads the metrics stored with each checkpoint, which may be damaged.
        return self.latest if step == "last" else self._find_best()

    def _find_best(self) -> int:
        """The first step with the best monitored metric."""
        monitored = self._monitored or self._recorded_monitor()
        if monitored is None:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is known to be the best, because the run monitors "
                "no metric: use step 'last' or a number, or train with "
                "`Evaluation(monitor=cx.Monitor(metric=...))`."
            )
        ranks = self._rank_all(*monitored)
        unread = [step for step in self.steps if step not in ranks]
        if unread:
            log.warning("damaged and therefore not the best: the checkpoints of steps %s", unread)
        if max(ranks.values(), default=-math.inf) == -math.inf:
            raise CheckpointError(
                f"no checkpoint in {self.folder} has a figure for the monitored metric "
                f"{monitored[0]!r}, so none is known to be the best: use step 'last' or a number."
            )
        return max(ranks, key=lambda step: (ranks[step], -step))

    def _recorded_monitor(self) -> tuple[str, Mode] | None:
        """What the run monitored when it saved its newest checkpoint that can be read."""
        for step in reversed(self.steps):
            with contextlib.suppress(CheckpointError):
                recorded = self.about(step).get("monitor")
                return (recorded["metric"], recorded["mode"]) if recorded else None
        return None

    def about(self, step: int) -> dict[str, Any]:
        """What was recorded with a checkpoint: step, metrics, config, devices."""
        try:
            return read_object(self.folder / str(step) / "about" / "metadata")
        except (OSError, ValueError) as error:
            raise self._read_error(step, error) from error

    def restore(
        self,
        step: int,
        like: PyTree,
        *,
        strict: bool = True,
        keep_hyperparameters: bool = False,
    ) -> Restored:
        """Reads a state with the structure and shardings of `like`, and checks its digests.

        Args:
            step: of the checkpoint.
            like: a state; its own arrays stand in for those that the checkpoint lacks.
            strict: whether to refuse a checkpoint whose arrays differ in name, shape or dtype,
                instead of restoring those that match.
            keep_hyperparameters: whether constants of `optax.inject_hyperparams` stay those of
                `like`.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another model.
        """
        about, manifest, stored = self._open(step)
        wanted = by_path(like)
        match = compare(wanted, stored)
        if match.faults and strict:
            more = f" and {len(match.faults) - 3} more" if len(match.faults) > 3 else ""
            raise OtherModelError(
                f"the checkpoint of step {step} in {self.folder} is of another model or optimizer: "
                f"{'; '.join(match.faults[:3])}{more}. Build the trainer with the settings of that "
                "run, which are in its config.json, or take what matches with "
                "`restore(strict=False)`."
            )
        targets = {
            path: jax.ShapeDtypeStruct(
                wanted[path].shape, stored[path].dtype, sharding=wanted[path].sharding
            )
            for path in match.common
        }
        found = self._read(step, targets, ocp.checkpoint_utils.construct_restore_args(targets))
        self._check(step, manifest, found)
        notes = [*match.notes, *([] if manifest else [_NO_MANIFEST])]
        for path in match.retyped:
            found[path] = found[path].astype(wanted[path].dtype)
        for path in constant_hyperparameters(match.common):
            ours, theirs = np.asarray(wanted[path]), np.asarray(found[path])
            if not np.array_equal(ours, theirs):
                used = "that of the trainer" if keep_hyperparameters else "that of the checkpoint"
                notes.append(
                    f"{path} is {theirs:.6g} in the checkpoint and {ours:.6g} in the trainer: "
                    f"{used} is used"
                )
                found[path] = wanted[path] if keep_hyperparameters else found[path]
        leaves = [
            found[path] if path in found else initial_value(path, leaf, found)
            for path, leaf in wanted.items()
        ]
        return Restored(jax.tree.unflatten(jax.tree.structure(like), leaves), about, notes)

    def restore_first_readable(
        self, steps: Sequence[int], like: PyTree, **options: bool
    ) -> Restored:
        """`restore` of the first of these checkpoints that is not damaged.

        Raises:
            CheckpointError: all of them are; the message is that of the last.
        """
        *others, last = steps
        for step in others:
            try:
                return self.restore(step, like, **options)
            except OtherModelError:
                raise
            except CheckpointError as error:
                log.warning("skipped: %s", error)
        return self.restore(last, like, **options)

    def read_arrays(self, step: int, prefix: str | tuple[str, ...]) -> dict[str, np.ndarray]:
        """The arrays of a checkpoint whose path begins like this, on the host, checked."""
        _, manifest, stored = self._open(step)
        paths = [path for path in stored if path.startswith(prefix)]
        found = self._read_on_host(step, paths)
        self._check(step, manifest, found)
        return found

    def verify(self, step: int) -> tuple[int, bool]:
        """Reads all of a checkpoint, and compares it with its digests.

        Returns:
            How many arrays it has, and whether there were digests to compare with.

        Raises:
            CheckpointError: it is damaged.
        """
        _, manifest, stored = self._open(step)
        chunk: list[str] = []
        size = 0
        for path in stored:
            chunk.append(path)
            size += math.prod(stored[path].shape) * np.dtype(stored[path].dtype).itemsize
            if size >= CHUNK:
                self._check(step, manifest, self._read_on_host(step, chunk))
                chunk, size = [], 0
        if chunk:
            self._check(step, manifest, self._read_on_host(step, chunk))
        return len(stored), manifest is not None

    def _open(self, step: int) -> tuple[dict[str, Any], Manifest | None, Mapping[str, Any]]:
        """What was recorded with a checkpoint, its manifest, and the list of its arrays."""
        if step not in self.steps:
            raise CheckpointError(
                f"{self.folder} has no checkpoint of step {step}; it has {self.steps}."
            )
        about = self.about(step)
        try:
            manifest = read_manifest(self.folder / str(step))
            stored = self._manager.item_metadata(step)["state"].tree
            if stored is None:
                raise FileNotFoundError("the list of its arrays is missing")
            if manifest is not None and digest_object(about) != manifest.about:
                raise ValueError("about/metadata is not what was written")
            if manifest is not None and stored.keys() != manifest.arrays.keys():
                odd = sorted(stored.keys() ^ manifest.arrays.keys())
                raise ValueError(f"the list of its arrays is wrong about {describe_paths(odd)}")
        except Exception as error:  # whatever Orbax and TensorStore may raise
            raise self._read_error(step, error) from error
        return about, manifest, stored

    def _read_on_host(self, step: int, paths: Sequence[str]) -> dict[str, np.ndarray]:
        arguments = {path: ocp.RestoreArgs(restore_type=np.ndarray) for path in paths}
        return self._read(step, dict.fromkeys(paths, 0), arguments)

    def _read(self, step: int, targets: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
        if not targets:
            return {}
        try:
            return dict(
                self._manager.restore(
                    step,
                    args=ocp.args.Composite(
                        state=ocp.args.PyTreeRestore(
                            dict(targets), restore_args=arguments, partial_restore=True
                        )
                    ),
                )["state"]
            )
        except Exception as error:
            raise self._read_error(step, error) from error

    def _check(self, step: int, manifest: Manifest | None, found: Mapping[str, Any]) -> None:
        damaged = [] if manifest is None else find_damaged(manifest, found)
        if damaged:
            error = ValueError(f"{describe_paths(damaged)}: not what was saved")
            raise self._read_error(step, error)

    def _read_error(self, step: int, error: Exception) -> CheckpointError:
        before = [s for s in self.steps if s < step]
        way_out = (
            f"The one before is of step {before[-1]}: `constrainx resume RUN --step {before[-1]}`, "
            "or `--fallback` for the newest that can be read."
            if before
            else "There is none before it."
        )
        finding = describe_error(error)
        damage = CheckpointError(
            f"the checkpoint of step {step} in {self.folder} is damaged. {way_out} What was "
            f"found: {finding}."
        )
        damage.finding = finding
        return damage


_NO_MANIFEST = "the checkpoint has no digests, so nobody can tell whether it is what was saved"


def rank(metrics: Any, metric: str, mode: Mode) -> float:
    """The rank of a checkpoint with these metrics; larger is better."""
    value = metrics.get(metric) if isinstance(metrics, Mapping) else None
    if not isinstance(value, int | float) or math.isnan(value):
        return -math.inf
    return -value if mode == "min" else value
