"""`constrainx certify`."""

from __future__ import annotations

import dataclasses
import pathlib

import tyro

from constrainx.cli._command import PlainCommand
from constrainx.cli._console import print_line
from constrainx.cli._resume import WhichStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certify(PlainCommand):
    """Measure on held-out data how well the constraints of a run hold; exit code 1 if one fails.

    Attributes:
        run: the folder of a run.
        step: the checkpoint to measure.
        fallback: if that checkpoint is damaged, whether to take an earlier one.
        confidence: the confidence level of all bounds, at least 0.5 and below 1.
        share: the share of points that may exceed the tolerance; any if left out.
        draws: how many draws, for constraints that draw their own points.
        devices: how many devices to use; as the recipe says if left out.
        fsdp: how many devices share each large parameter; as the recipe says if left out.
        recipe: the file of the run's recipe, if it is your own: its code is executed.
    """

    run: tyro.conf.Positional[pathlib.Path]
    step: WhichStep = "last"
    fallback: bool = False
    confidence: float = 0.95
    share: float | None = None
    draws: int = 512
    devices: int | None = None
    fsdp: int | None = None
    recipe: pathlib.Path | None = None

    def execute(self) -> None:
        """Restores the checkpoint, and prints and records the certificate."""
        from constrainx.recipes import build_trainer, read_recipe, record_certificate

        place = {"devices": self.devices, "fsdp": self.fsdp}
        given = {name: value for name, value in place.items() if value is not None}
        recipe = read_recipe(self.run, file=self.recipe).but(**given)
        trainer = build_trainer(recipe, run=self.run)
        step = trainer.restore(self.step, fallback=self.fallback)
        certificate = trainer.certify(
            confidence=self.confidence, share=self.share, draws=self.draws
        )
        print_line(f"{recipe.name} {recipe.method}, step {step}")
        for line in str(certificate).splitlines():
            print_line(line)
        print_line(f"Written to {record_certificate(self.run, certificate, step=step)}")
        if not certificate.met:
            raise SystemExit(1)
