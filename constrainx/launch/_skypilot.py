"""Tasks for SkyPilot, which finds machines at many clouds."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from typing import Any, ClassVar

from constrainx.launch._job import Job, check_word
from constrainx.launch._yaml import write_documents

MOUNT = "/runs"
PORT = 12621
# SkyPilot tells each node the addresses of all, and which of them it is.
JOIN = f'"$(head -n1 <<<"$SKYPILOT_NODE_IPS"):{PORT},$SKYPILOT_NUM_NODES,$SKYPILOT_NODE_RANK"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkyPilot:
    """Writes a managed job, which is moved to other machines when its own are taken away.

    Attributes:
        volume: a SkyPilot volume that nodes can share, for the folders of runs, see `sky volumes`.
        accelerator: the kind of GPU, such as H100 or A100-80GB.
        infra: where to look for machines, such as gcp, aws/us-east-1 or k8s; anywhere if left out.
        spot: whether to take machines that are cheap and may be taken away.
        container_image: a Docker image with constrainx, instead of `setup`.
        setup: commands that install constrainx; by pip if left out.
        retries: how often to start again after an error of the run's own.
    """

    suffix: ClassVar[str] = ".skypilot.yaml"
    tool: ClassVar[str] = "sky, by `pip install skypilot`"

    volume: str
    accelerator: str = "H100"
    infra: str | None = None
    spot: bool = True
    container_image: str | None = None
    setup: str | None = None
    retries: int = 3

    def __post_init__(self) -> None:
        for option in ("volume", "accelerator", "infra", "container_image"):
            check_word(f"--{option.replace('_', '-')}", getattr(self, option))

    def place(self, run: pathlib.Path) -> pathlib.Path:
        """On the shared volume, in place of the folder "runs"."""
        return pathlib.Path(MOUNT, *run.parts[1:])

    def write(self, job: Job) -> str:
        """The task."""
        from constrainx.runtime import ABORTED, STOPPED

        extra = "constrainx[cuda]" if job.gpus else "constrainx"
        install = None if self.container_image else f"pip install '{extra}'"
        image = None if self.container_image is None else f"docker:{self.container_image}"
        *words, _ = job.train(distributed="")
        resources = {
            "infra": self.infra,
            "accelerators": f"{self.accelerator}:{job.gpus}" if job.gpus else None,
            "image_id": image,
            "use_spot": self.spot,
            "job_recovery": {
                "max_restarts_on_errors": self.retries,
                # Asked to stop, and saved; a peer was lost.
                "recover_on_exit_codes": [STOPPED, int(ABORTED)],
            },
        }
        task = {
            "name": job.name,
            "num_nodes": job.nodes,
            # The file of the user's own recipe.
            "workdir": "." if job.recipe.endswith(".py") else None,
            "resources": _drop_empty(resources),
            "volumes": {MOUNT: self.volume},
            "setup": self.setup or install,
            "run": f"{shlex.join(words)} \\\n  {JOIN}\n",
        }
        return write_documents(job.written_by, _drop_empty(task))

    def submission(self, file: pathlib.Path) -> list[str]:
        """By `sky jobs`, because what `sky launch` starts is not moved."""
        return ["sky", "jobs", "launch", "--yes", str(file)]


def _drop_empty(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if value is not None}
