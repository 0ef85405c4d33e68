"""The settings of a trainer, in groups: evaluation, run folder, devices, logging."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
from jax.sharding import Mesh

from constrainx.data import Batches
from constrainx.errors import ArgumentError, check_choice
from constrainx.runtime import Callback, Keep, Profile, check_path
from constrainx.trainers._checks import check_batches, check_count
from constrainx.trainers._learning_rate import LearningRate

OnSaveError: TypeAlias = Literal["stop", "continue"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Monitor:
    """The metric of the evaluation that decides which checkpoint is best, and when to stop.

    Attributes:
        metric: its name.
        mode: whether smaller or larger is better.
        patience: stop after this many evaluations without a new best; None never stops.
        min_change: by how much a new best must be better.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    patience: int | None = None
    min_change: float = 0.0

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("min", "max"), owner="Monitor")

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether the value is a new best."""
        if math.isnan(value):
            return False
        gain = math.inf if best is None else (best - value if self.mode == "min" else value - best)
        return gain > self.min_change


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What is measured on held-out data, and when.

    Attributes:
        data: the held-out batches; metrics are over all of their examples.
        metrics: (model, batch) ↦ a figure for each example, by name. The violation of each
            constraint is measured as well.
        every: steps between evaluations; None for one at the end.
        monitor: which metric decides what is best, and when to stop.
    """

    data: Batches
    _: dataclasses.KW_ONLY
    metrics: Mapping[str, Callable[[Any, Any], jax.Array]] = dataclasses.field(default_factory=dict)
    every: int | None = None
    monitor: Monitor | None = None

    def __post_init__(self) -> None:
        check_batches("Evaluation(data=...)", self.data)
        check_count("Evaluation(every=...)", self.every)


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where a run keeps its config, metrics, TensorBoard events and checkpoints.

    Attributes:
        path: the folder.
        config: what to write to its config.json.
        save_every: steps between checkpoints; None for one at the end.
        keep: which checkpoints stay.
        on_save_error: "stop", or "continue" without that checkpoint.
        may_change: entries of ``config`` that may differ from those of a run that is continued. The
            run's config.json then has the new values, and the old ones in a list of changes.
    """

    path: pathlib.Path | str
    _: dataclasses.KW_ONLY
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    save_every: int | None = None
    keep: Keep = dataclasses.field(default_factory=Keep)
    on_save_error: OnSaveError = "stop"
    may_change: Collection[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", pathlib.Path(self.path))
        check_path(pathlib.Path(self.path))
        check_count("RunFolder(save_every=...)", self.save_every)
        check_choice("on_save_error", self.on_save_error, get_args(OnSaveError), owner="RunFolder")


@dataclasses.dataclass(frozen=True)
class Devices:
    """Which devices train.

    Attributes:
        count: how many; None for all.
        fsdp: how many of them share each large parameter.
        mesh: instead of both, a mesh with the axes "data" and "fsdp", which must be automatic. Its
            devices may be those of a topology, which do not exist: see `Trainer.lower`.
    """

    count: int | None = None
    _: dataclasses.KW_ONLY
    fsdp: int = 1
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        if self.mesh is None:
            return
        if self.count is not None or self.fsdp != 1:
            raise ArgumentError("`Devices(mesh=...)` has its own sizes: leave out the other two.")
        if self.mesh.axis_names != ("data", "fsdp"):
            raise ArgumentError(
                '`Devices(mesh=...)` must have the axes ("data", "fsdp"), got '
                f"{self.mesh.axis_names}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logging:
    """What is logged during a run, and which callbacks are called.

    Attributes:
        every: steps between logs. In between, the host does not wait for the device.
        callbacks: called in addition to those that write the run folder and the bar.
        progress: whether to show a bar.
        title: the name of the run next to the bar.
        learning_rate: the number or the schedule that the optimizer was made with, to log it. That
            of `optax.inject_hyperparams` is found by itself.
        profile: which steps to trace, and where to.
    """

    every: int = 50
    callbacks: Sequence[Callback] = ()
    progress: bool = True
    title: str = ""
    learning_rate: LearningRate | None = None
    profile: Profile | None = None

    def __post_init__(self) -> None:
        check_count("Logging(every=...)", self.every)


def as_evaluation(value: Evaluation | Batches | None) -> Evaluation | None:
    """Just held-out data means an evaluation at the end."""
    if value is None or isinstance(value, Evaluation):
        return value
    check_batches("Trainer(evaluation=...)", value)
    return Evaluation(value)


def as_run_folder(value: RunFolder | pathlib.Path | str | None) -> RunFolder | None:
    """Just a path means a folder with the default settings."""
    return value if value is None or isinstance(value, RunFolder) else RunFolder(value)


def as_devices(value: Devices | int | None) -> Devices:
    """Just a number means that many devices, each with a copy of every parameter."""
    return value if isinstance(value, Devices) else Devices(value)
