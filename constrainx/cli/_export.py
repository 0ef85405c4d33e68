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
    """Write the weights of a run as a .safetensors file.

    Attributes:
        run: the folder of a run.
        to: the file to write; ends in .safetensors. By default it is weights.safetensors in the
            folder of the run, or weights-timm.safetensors and the like for a layout.
        step: the checkpoint to export.
        average: whether to take the moving average of the parameters, if there is one.
        masks: "prune" sets the weights that masks leave out to zero, and writes no masks; "keep"
            writes all weights, and the probabilities beside them.
        layout: the library that is to load the file, whose names and axes are then used; for
            `ResNet` and `Swin`. Those of the model itself if left out.
        recipe: the file of the run's recipe, if it is your own: its code is executed.
    """

    run: tyro.conf.Positional[pathlib.Path]
    to: pathlib.Path | None = None
    step: int | Literal["last", "best"] = "last"
    average: bool = True
    masks: Literal["prune", "keep"] = "prune"
    layout: Literal["torchvision", "timm", "transformers"] | None = None
    recipe: pathlib.Path | None = None

    def execute(self) -> None:
        """Writes the file."""
        name = f"weights-{self.layout}" if self.layout else "weights"
        path = self.to or self.run / f"{name}.safetensors"
        if path.suffix != ".safetensors":
            raise ArgumentError(f"`--to` must end in .safetensors, got {path}.")
        from constrainx.recipes import export_weights, load

        model = load(self.run, step=self.step, average=self.average, recipe=self.recipe)
        prune = self.masks == "prune"
        count = export_weights(model, path, prune=prune, layout=self.layout)
        print_line(f"{count} arrays: {path}")
