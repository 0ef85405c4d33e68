"""Checkpoints, which Orbax writes atomically in the background, and which are read by name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jaxtyping import PyTree
from orbax.checkpoint import checkpoint_managers as policies

from constrainx.errors import ArgumentError, UserError

log = logging.getLogger("constrainx")

Mode: TypeAlias = Literal["min", "max"]
# Parts of the training state that a checkpoint may lack; they are initialised instead.
MAY_BE_MISSING = ("constraints", "ema")


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be read or written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints to keep. One that matches any of these rules stays.

    Attributes:
        last: keep this many of the newest.
        best: keep this many of the best, by the monitored metric.
        every: keep every checkpoint whose step is a multiple of this; None for no such rule.
    """

    last: int = 3
    best: int = 1
    every: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ArgumentError(f"`Keep(last=...)` must be at least 1, got {self.last!r}.")
        if self.best < 0:
            raise ArgumentError(f"`Keep(best=...)` must be at least 0, got {self.best!r}.")
        if self.every is not None and self.every < 1:
            raise ArgumentError(
                f"`Keep(every=...)` must be at least 1 or None, got {self.every!r}."
            )


class Checkpoints:
    """The checkpoints of one run.

    Arrays are stored under their path in the state. A state that does not match can then be
    refused with the names of what is missing.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        keep: Keep = Keep(),
        metric: str | None = None,
        mode: Mode = "min",
        reading: bool = False,
    ):
        self.folder = folder
        self._metric, self._mode = metric, mode
        self._ranks: dict[int, float] = {}
        preserved: list[Any] = [policies.LatestN(n=keep.last)]
        if keep.every is not None:
            preserved.append(policies.EveryNSteps(interval_steps=keep.every))
        if metric is not None and keep.best:
            preserved.append(_BestSteps(rank=self._ranks, count=keep.best))
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(preserved),
                enable_async_checkpointing=True,
                cleanup_tmp_directories=not reading,
                create=not reading,
            ),
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(),
                "about": ocp.JsonCheckpointHandler(),
            },
        )
        self._begun: int | None = None
        for step in self.steps:
            # A checkpoint that cannot be read is never the best; it raises when it is asked for.
            with contextlib.suppress(CheckpointError):
                self._ranks[step] = self._rank(self.about(step).get("metrics"))

    def _rank(self, metrics: Mapping[str, float] | None) -> float:
        """Larger is better."""
        value = (metrics or {}).get(self._metric or "", math.nan)
        value = -value if self._mode == "min" else value
        return -math.inf if math.isnan(value) else value

    @property
    def steps(self) -> list[int]:
        """The steps that were saved completely, in order."""
        return sorted(self._manager.all_steps())

    @property
    def latest(self) -> int | None:
        """The step of the newest checkpoint, or None."""
        return max(self.steps, default=None)

    @property
    def best(self) -> int | None:
        """The first step with the best monitored metric, or the newest if none is monitored."""
        ranked = {}
        for step in self.steps:
            about = self.about(step)
            ranked[step] = self._rank(about.get("metrics"))
        if not ranked or max(ranked.values()) == -math.inf:
            return self.latest
        return max(ranked, key=lambda step: (ranked[step], -step))

    def find(self, step: int | Literal["last", "best"]) -> int:
        """The step that a number, "last" or "best" stands for.

        Raises:
            CheckpointError: there is no complete checkpoint.
        """
        if isinstance(step, str) and step not in ("last", "best"):
            raise ArgumentError(
                f"`restore(step=...)` must be a number, 'last' or 'best', got {step!r}."
            )
        if not isinstance(step, str):
            return step
        # Only "best" reads the metrics stored with each checkpoint, which may be damaged.
        found = self.latest if step == "last" else self.best
        if found is None:
            raise CheckpointError(f"{self.folder.parent} has no complete checkpoint.")
        return found

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
        self._ranks[step] = self._rank(metrics)
        self._begun = step
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(by_path(state)), about=ocp.args.JsonSave(about)
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

    def _write_error(self, error: Exception) -> CheckpointError:
        # The incomplete files would keep a full disk full.
        if jax.process_index() == 0:
            for part in self.folder.glob(f"{self._begun}.orbax-checkpoint-tmp*"):
                shutil.rmtree(part, ignore_errors=True)
        return CheckpointError(
            f"the checkpoint of step {self._begun} could not be written to {self.folder}: "
            f"{_describe_error(error)}. Older checkpoints are intact."
        )

    def about(self, step: int) -> dict[str, Any]:
        """What was recorded with a checkpoint: step, metrics, config, devices."""
        path = self.folder / str(step) / "about" / "metadata"
        try:
            return json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise _read_error(step, self, error) from error

    def restore(self, step: int, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """A state with the structure and shardings of `like`, and what was recorded with it.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another model.
        """
        if step not in self.steps:
            raise CheckpointError(
                f"{self.folder} has no checkpoint of step {step}; it has {self.steps}."
            )
        about = self.about(step)
        wanted = by_path(like)
        try:
            stored = self._manager.item_metadata(step)["state"].tree
            if stored is None:
                raise FileNotFoundError("the list of its arrays is missing")
        except Exception as error:
            raise _read_error(step, self, error) from error
        missing = _check_same_model(wanted, stored, step, self.folder)
        targets = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for path, leaf in wanted.items()
            if path not in missing
        }
        try:
            found = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeRestore(
                        targets,
                        restore_args=ocp.checkpoint_utils.construct_restore_args(targets),
                        partial_restore=True,
                    )
                ),
            )["state"]
        except Exception as error:
            raise _read_error(step, self, error) from error
        if missing:
            log.info("step %d has no %s: initialised instead", step, ", ".join(sorted(missing)))
        leaves = [
            _initial_value(path, leaf, found) if path in missing else found[path]
            for path, leaf in wanted.items()
        ]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), about

    def restore_first_readable(
        self, steps: Sequence[int], like: PyTree
    ) -> tuple[PyTree, dict[str, Any]]:
        """`restore` of the first of these checkpoints that can be read.

        Raises:
            CheckpointError: none of them can; the message is that of the last.
        """
        *others, last = steps
        for step in others:
            with contextlib.suppress(CheckpointError):
                return self.restore(step, like)
        return self.restore(last, like)


@dataclasses.dataclass
class _BestSteps(policies.PreservationPolicy):
    """Keeps the best steps, including those that an earlier process saved.

    Orbax's own `BestN` has no metrics for those.
    """

    rank: Mapping[int, float]
    count: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        del context
        ranks = {info.step: self.rank.get(info.step, -math.inf) for info in checkpoints}
        ranked = [step for step in ranks if ranks[step] > -math.inf]
        best = sorted(ranked, key=lambda step: (ranks[step], -step))[-self.count :]
        return [info.step in best for info in checkpoints]


def has_checkpoints(folder: pathlib.Path) -> bool:
    """Whether a folder holds a complete checkpoint. While one is written, it has another name."""
    return any(child.name.isdigit() for child in folder.iterdir())


def by_path(state: PyTree) -> dict[str, Any]:
    """The arrays of a state by their path, such as ``parameters.layers.0.kernel``."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def _initial_value(path: str, initial: Any, found: Mapping[str, Any]) -> Any:
    """The value of a part that a checkpoint lacks.

    An average starts at the parameters, and the constraints' count of steps at that of the run.
    """
    part, _, rest = path.partition(".")
    source = {"ema": f"parameters.{rest}", "constraints": rest}[part]
    # A copy, because both are donated to the compiled step.
    return jax.numpy.copy(found[source]) if source in found else initial


def _check_same_model(
    wanted: Mapping[str, Any], stored: Mapping[str, Any], step: int, folder: pathlib.Path
) -> set[str]:
    """The paths that are missing and may be; raises for any others, and where shapes differ."""
    missing = {path for path in wanted if path not in stored}
    unknown = {path for path in missing if path.split(".")[0] not in MAY_BE_MISSING}
    different = [
        f"{path} is {tuple(stored[path].shape)} there and {tuple(np.shape(leaf))} here"
        for path, leaf in wanted.items()
        if path not in missing and tuple(stored[path].shape) != tuple(np.shape(leaf))
    ]
    if unknown or different:
        lines = [*different, *(f"{path} is missing there" for path in sorted(unknown))]
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise CheckpointError(
            f"the checkpoint of step {step} in {folder} is of another model or optimizer: "
            f"{'; '.join(lines[:3])}{more}. Build the trainer with the settings of that run, which "
            "are in its config.json."
        )
    return missing


def _read_error(step: int, checkpoints: Checkpoints, error: Exception) -> CheckpointError:
    before = [s for s in checkpoints.steps if s < step]
    way_out = (
        f"The one before is of step {before[-1]}: `constrainx resume RUN --step {before[-1]}`, or "
        "`--fallback` for the newest that can be read."
        if before
        else "There is none before it."
    )
    return CheckpointError(
        f"the checkpoint of step {step} in {checkpoints.folder} is damaged. {way_out} What was "
        f"found: {_describe_error(error)}."
    )


def _describe_error(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = lines[0]
    # Tensorstore begins with the array and ends with the operating system's message.
    short = line if len(line) <= 300 else f"{line[:120]} … {line[-170:]}"
    return f"{type(error).__name__}: {short}"
