"""`constrainx verify`."""

from __future__ import annotations

import dataclasses
import pathlib

import tyro

from constrainx.cli._command import PlainCommand
from constrainx.cli._console import print_line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify(PlainCommand):
    """Read all checkpoints of a run, and compare them with the digests that were saved.

    Prints a line for each checkpoint, and exits with code 1 if one is damaged.

    Attributes:
        run: the folder of a run.
    """

    run: tyro.conf.Positional[pathlib.Path]

    def execute(self) -> None:
        """Prints the lines."""
        from constrainx.runtime import CheckpointError, StoredCheckpoints, has_checkpoints

        folder = self.run / "checkpoints"
        if not has_checkpoints(folder):
            raise CheckpointError(f"{self.run} has no complete checkpoint.")
        checkpoints = StoredCheckpoints(folder)
        damaged = 0
        for step in checkpoints.steps:
            try:
                count, was_compared = checkpoints.verify(step)
            except CheckpointError as error:
                damaged += 1
                print_line(f"step {step}: damaged: {error.finding or error}")
            else:
                verdict = "good" if was_compared else "can be read, but has no digests"
                print_line(f"step {step}: {verdict}, {count} arrays")
        checkpoints.close()
        if damaged:
            raise SystemExit(1)
