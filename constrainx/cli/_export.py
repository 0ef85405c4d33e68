"""`constrainx export`."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Literal

import tyro

from constrainx.cli._command import PlainCommand
from constrainx.cli._console import print_line
from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(PlainCommand):
    """Write the weights of a run as a .safetensors file, under names such as hidden.kernel.

    Attributes:
        run: the folder of a run.
        to: the file to write; ends in .safetensors.
        step: which checkpoint.
        average: whether to take the moving average of the parameters, if there is one.
        masks: "prune" sets the weights that masks leave out to zero, and writes no masks; "keep"
            writes all weights, and the probabilities beside them.
        recipe: the file of the run's recipe, if it is your own: its code is executed.
    """

    run: tyro.conf.Positional[pathlib.Path]
    to: pathlib.Path
    step: int | Literal["last", "best"] = "last"
    average: bool = True
    masks: Literal["prune", "keep"] = "prune"
    recipe: pathlib.Path | None = None

    def execute(self) -> None:
        """Writes the file."""
        if self.to.suffix != ".safetensors":
            raise ArgumentError(f"`--to` must end in .safetensors, got {self.to}.")
        from constrainx.recipes import export_weights, load

        model = load(self.run, step=self.step, average=self.average, recipe=self.recipe)
        count = export_weights(model, self.to, prune=self.masks == "prune")
        print_line(f"{count} arrays: {self.to}")
