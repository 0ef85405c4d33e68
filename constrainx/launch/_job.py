"""A training run on some nodes, in the terms that all schedulers share."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import ClassVar, Protocol

from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, and on how many nodes.

    >>> job = Job(
    ...     name="inertia",
    ...     recipe="o3-inertia",
    ...     options=("--width", "64"),
    ...     run=pathlib.Path("runs/inertia"),
    ...     nodes=8,
    ...     gpus=4,
    ...     batch=128,
    ... )
    >>> job.list_nodes(2)
    [8, 4, 2]

    Attributes:
        name: of the job, and of what belongs to it.
        recipe: its name, or the file with the user's own.
        options: further words of ``constrainx train``, as the user wrote them.
        run: the folder of the run, on a file system that the nodes share.
        nodes: how many.
        gpus: how many each node has; 0 for one process on its CPUs.
        batch: the size of the global batch, which the devices must divide; None if not known.
        fsdp: how many devices share a large parameter, which must divide the devices.
        written_by: the command that describes the job, for a comment in its file.
    """

    name: str
    recipe: str
    options: Sequence[str]
    run: pathlib.Path
    nodes: int
    gpus: int
    batch: int | None = None
    fsdp: int = 1
    written_by: str = ""

    def __post_init__(self) -> None:
        # Names of services in Kubernetes, the strictest of all, with room for what it appends.
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", self.name):
            raise ArgumentError(
                f"`--name {self.name}` must be at most 50 small letters, digits and hyphens, with "
                "a letter first and no hyphen last."
            )
        if self.nodes < 1:
            raise ArgumentError(f"`--nodes` must be at least 1, got {self.nodes}.")
        if self.gpus < 0:
            raise ArgumentError(
                f"`--gpus-per-node` must be 0, for CPUs alone, or more, got {self.gpus}."
            )
        if not self._fits(self.nodes):
            raise ArgumentError(
                f"{self.nodes} nodes have {self._count_devices(self.nodes)} devices, which must "
                f"divide the batch of {self.batch} and be a multiple of `--fsdp {self.fsdp}`: "
                f"{self._suggest_nodes()}."
            )

    def list_nodes(self, least: int) -> list[int]:
        """The numbers of nodes on which the job can run, the largest first.

        Args:
            least: the smallest that is wanted.
        """
        if not 1 <= least <= self.nodes:
            raise ArgumentError(
                f"`--min-nodes` must be between 1 and `--nodes {self.nodes}`, got {least}."
            )
        return [nodes for nodes in range(self.nodes, least - 1, -1) if self._fits(nodes)]

    def train(self, *, distributed: str) -> list[str]:
        """The command of each process, which continues the run wherever it was interrupted.

        Args:
            distributed: how it joins the others, see `constrainx.runtime.join`.
        """
        return [
            *("constrainx", "train", self.recipe, *self.options),
            *("--run", str(self.run), "--resume-if-possible", "--fail-if-stopped"),
            *("--distributed", distributed),
        ]

    def _count_devices(self, nodes: int) -> int:
        return nodes * max(self.gpus, 1)

    def _fits(self, nodes: int) -> bool:
        devices = self._count_devices(nodes)
        return devices % self.fsdp == 0 and (self.batch is None or self.batch % devices == 0)

    def _suggest_nodes(self) -> str:
        most = self.nodes if self.batch is None else max(self.nodes, self.batch)
        fitting = [nodes for nodes in range(1, most + 1) if self._fits(nodes)]
        near = [max((n for n in fitting if n < self.nodes), default=None)]
        near.append(min((n for n in fitting if n > self.nodes), default=None))
        words = " or ".join(str(nodes) for nodes in near if nodes is not None)
        return f"use {words} nodes, or another batch" if words else "use another batch or `--fsdp`"


class Scheduler(Protocol):
    """Writes job files in the format of one scheduler.

    Attributes:
        suffix: the end of the name of its files.
        tool: the program that its files are submitted by, and where that comes from.
    """

    suffix: ClassVar[str]
    tool: ClassVar[str]

    def place(self, run: pathlib.Path) -> pathlib.Path:
        """Where all nodes see the folder of a run that would be ``run`` on one machine."""

    def write(self, job: Job) -> str:
        """The content of the job's file."""

    def submission(self, file: pathlib.Path) -> list[str]:
        """The command that submits the file."""


def check_word(option: str, value: str | None) -> None:
    """Raises if a value would end the line of a job file, or start another option in it."""
    if value is not None and not re.fullmatch(r"[\w.:/@%+,=\[\]~-]+", value):
        raise ArgumentError(f"`{option}` must be one word without quotes, got {value!r}.")
