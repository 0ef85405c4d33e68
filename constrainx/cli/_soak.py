"""`constrainx soak`."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from constrainx.cli._command import RecipeCommand
from constrainx.cli._console import print_line, print_table

if TYPE_CHECKING:
    from constrainx.recipes import Recipe

HEADINGS = ("resumed on", "kills", "in saves", "repeated", "lost", "difference", "undisturbed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Soak(RecipeCommand):
    """Kill a run at random moments and resume it, on other devices, too; compare the results.

    Attributes:
        kills: how often each run is killed.
        chance: the seed that decides at which moments.
        out: the folder for the runs and the table, which is emptied first.
    """

    without: ClassVar[Sequence[str]] = ("devices", "fsdp", "log_every")

    kills: int = 20
    chance: int = 0
    out: pathlib.Path = pathlib.Path("results/soak")

    def execute(self, recipe: Recipe) -> None:
        """Runs it in separate processes, and prints and writes a table."""
        from constrainx.recipes import soak

        if recipe.save_every is None:
            recipe = recipe.but(save_every=2)
        # As an exception, so that no process that was started stays behind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        folder = self.out / recipe.name
        shutil.rmtree(folder, ignore_errors=True)
        found = []
        for one in soak(recipe, kills=self.kills, folder=folder, chance=self.chance):
            found.append(one)
            print_line(f"{recipe.name}, {one.layout}: {one.kills} kills")
        print_table(
            [
                (
                    one.layout,
                    f"{one.kills}",
                    f"{one.in_saves}",
                    f"{one.repeated}",
                    f"{one.lost}",
                    f"{one.difference:.2g}",
                    f"{one.undisturbed:.2g}",
                )
                for one in found
            ],
            headings=HEADINGS,
            title=f"{recipe.name} {recipe.method}, size {recipe.size}, {found[0].steps} steps, "
            f"saved every {recipe.save_every}",
        )
        record = [dataclasses.asdict(one) for one in found]
        (folder / "soak.json").write_text(json.dumps(record, indent=1) + "\n")
        exact = [one for one in found if one.layout == "same device"]
        if any(one.lost for one in found) or any(one.difference for one in exact):
            raise SystemExit(1)
