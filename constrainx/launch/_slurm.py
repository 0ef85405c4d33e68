"""Batch scripts for SLURM."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

from constrainx.errors import ArgumentError
from constrainx.launch._duration import read_seconds
from constrainx.launch._job import Job, check_word

Options: TypeAlias = dict[str, str | int | None]

TEMPLATE = """#!/bin/bash
# {written_by}
{header}

{setup}command -v constrainx >/dev/null || {{
  echo "constrainx is not on the PATH of this job: submit from its environment, or use --setup." >&2
  exit 1
}}

{count}
# Processes that have lost a peer say so, and end by themselves.
srun --nodes=$nodes --ntasks={tasks} --ntasks-per-node={tasks_per_node}{cpus} \\
  --kill-on-bad-exit=0 \\
  {train}
code=$?

# {stopped}: the time is up, and it has saved. Above 128: a process was killed, or lost a peer.
if ((code == {stopped} || (code > 128 && ${{SLURM_RESTART_COUNT:-0}} < {retries}))); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""

COUNT = """# As many of the nodes that came as the batch can be divided among.
for nodes in {counts}; do
  ((nodes <= SLURM_JOB_NUM_NODES)) && break
done
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm:
    """Writes a batch script that goes back into the queue until the run has ended.

    Attributes:
        min_nodes: start on as few nodes as this if no more are free, or if one has been lost; the
            job then has its nodes for itself. All of them if left out.
        partition: of the cluster.
        account: to charge.
        qos: quality of service.
        time: how long the job may take each time it is started, such as 24:00:00.
        notice: seconds before the end of that time at which to save and go back into the queue.
        cpus_per_task: for each process, of which there is one per GPU, or one per node without;
            what the cluster gives if left out.
        setup: commands that make `constrainx` available; if left out, the job has the environment
            that it was submitted in.
        retries: how often to start again after a process was killed.
    """

    suffix: ClassVar[str] = ".sh"
    tool: ClassVar[str] = "sbatch, on a login node of the cluster"

    min_nodes: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    notice: int = 120
    cpus_per_task: int | None = None
    setup: str = ""
    retries: int = 10

    def __post_init__(self) -> None:
        for option in ("partition", "account", "qos"):
            check_word(f"--{option}", getattr(self, option))
        if self.time is not None and read_seconds(self.time) <= self.notice:
            raise ArgumentError(
                f"`--time {self.time}` must be longer than `--notice {self.notice}` seconds."
            )

    def place(self, run: pathlib.Path) -> pathlib.Path:
        """Below the folder that the job is submitted in, which nodes of a cluster share."""
        return run

    def write(self, job: Job) -> str:
        """The script."""
        from constrainx.runtime import STOPPED

        counts = [job.nodes] if self.min_nodes is None else job.list_nodes(self.min_nodes)
        tasks = max(job.gpus, 1)
        cpus = self._share_cpus(tasks) if len(counts) > 1 else self.cpus_per_task
        choose = COUNT.format(counts=" ".join(map(str, counts)))
        return TEMPLATE.format(
            written_by=job.written_by,
            header="\n".join(_write_options(self._list_options(job, counts, tasks))),
            setup=f"{self.setup}\n" if self.setup else "",
            count=choose if len(counts) > 1 else f"nodes={job.nodes}",
            tasks="$nodes" if tasks == 1 else f"$((nodes * {tasks}))",
            tasks_per_node=tasks,
            # Since version 22.05 it is not taken over from the options of the job.
            cpus="" if cpus is None else f" --cpus-per-task={cpus}",
            train=shlex.join(job.train(distributed="auto")),
            stopped=STOPPED,
            retries=self.retries,
        )

    def submission(self, file: pathlib.Path) -> list[str]:
        """By `sbatch`."""
        return ["sbatch", str(file)]

    def _share_cpus(self, tasks: int) -> int | str:
        if self.cpus_per_task is not None:
            return self.cpus_per_task
        return "$SLURM_CPUS_ON_NODE" if tasks == 1 else f"$((SLURM_CPUS_ON_NODE / {tasks}))"

    def _list_options(self, job: Job, counts: Sequence[int], tasks: int) -> Options:
        # Of a range of nodes, SLURM gives the fewest that have room for the tasks. If it is asked
        # for as many tasks as nodes, and nodes are not shared, it gives as many as are free.
        several: Options = {
            "nodes": f"{counts[-1]}-{counts[0]}",
            "ntasks": counts[0],
            "exclusive": True,
        }
        fixed: Options = {
            "nodes": job.nodes,
            "ntasks-per-node": tasks,
            "cpus-per-task": self.cpus_per_task,
        }
        return {
            "job-name": job.name,
            **(several if len(counts) > 1 else fixed),
            # Not per task: JAX expects each to see all GPUs of its node.
            "gpus-per-node": job.gpus or None,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "time": self.time,
            "signal": f"TERM@{self.notice}",
            "requeue": True,
            "output": "%x-%j.log",
            "open-mode": "append",
        }


def _write_options(options: Options) -> list[str]:
    return [
        f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={value}"
        for name, value in options.items()
        if value is not None
    ]
