"""Submitting a job file by the scheduler's own program."""

from __future__ import annotations

import pathlib
import shlex
import shutil
import subprocess

from constrainx.errors import UserError
from constrainx.launch._job import Scheduler


class SubmissionError(UserError, RuntimeError):
    """A job could not be submitted."""


def submit(scheduler: Scheduler, file: pathlib.Path) -> None:
    """Submits a file, and shows what the scheduler says.

    Args:
        scheduler: which wrote the file.
        file: the job.

    Raises:
        SubmissionError: the scheduler's program is not here, or refuses.
    """
    command = scheduler.submission(file)
    if shutil.which(command[0]) is None:
        raise SubmissionError(
            f"`{command[0]}` is not installed here, so {file} was written and not submitted. "
            f"Install {scheduler.tool}, or submit it elsewhere: {shlex.join(command)}"
        )
    ended = subprocess.run(command)
    if ended.returncode:
        raise SubmissionError(
            f"`{shlex.join(command)}` failed with code {ended.returncode}; its reason is above."
        )
