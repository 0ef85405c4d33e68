"""`constrainx polish`."""

from __future__ import annotations

import dataclasses
import pathlib

import tyro

from constrainx.cli._command import PlainCommand
from constrainx.cli._console import print_line, print_metrics
from constrainx.cli._resume import WhichStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Polish(PlainCommand):
    """Make the constraints of a run hold at training points, by Gauss-Newton on them alone.

    Writes the weights to polished.safetensors in the folder of the run, and what was done to
    polished.json. Checkpoints stay as they are. The exit code is 1 if a constraint does not hold at
    these points.

    Attributes:
        run: the folder of a run.
        step: the checkpoint to polish.
        fallback: if that checkpoint is damaged, whether to take an earlier one.
        batches: how many training batches to use.
        weight: how much a change of the outputs at these points counts: 0 for not at all, inf for
            outputs that must not change.
        tolerance: the violation at which to end, 0 for rounding; each constraint's own if left out.
        draws: how many draws at each batch, for constraints that draw.
        max_steps: how many steps to take at most.
        devices: how many devices to use; as the recipe says if left out.
        fsdp: how many devices share each large parameter; as the recipe says if left out.
        recipe: the file of the run's recipe, if it is your own: its code is executed.
    """

    run: tyro.conf.Positional[pathlib.Path]
    step: WhichStep = "last"
    fallback: bool = False
    batches: int = 1
    weight: float = 10.0
    tolerance: float | None = None
    draws: int = 1
    max_steps: int = 50
    devices: int | None = None
    fsdp: int | None = None
    recipe: pathlib.Path | None = None

    def execute(self) -> None:
        """Restores the checkpoint, polishes it, and prints and records what that did."""
        from constrainx.recipes import build_trainer, read_recipe, record_polished
        from constrainx.trainers import Polish as Settings

        place = {"devices": self.devices, "fsdp": self.fsdp}
        given = {name: value for name, value in place.items() if value is not None}
        recipe = read_recipe(self.run, file=self.recipe).but(**given)
        trainer = build_trainer(recipe, run=self.run)
        step = trainer.restore(self.step, fallback=self.fallback)
        settings = Settings(
            batches=self.batches,
            weight=self.weight or None,
            of=recipe.outputs,
            tolerance=self.tolerance,
            draws=self.draws,
            max_steps=self.max_steps,
        )
        model, polished = trainer.run_polish(settings)
        print_line(f"{recipe.name} {recipe.method}, step {step}")
        for line in str(polished).splitlines():
            print_line(line)
        before = after = {}
        if trainer.evaluation is not None:
            before, after = trainer.evaluate(), trainer.evaluate_model(model)
            print_metrics("before, on held-out data", before)
            print_metrics("after, on held-out data", after)
        path = record_polished(self.run, model, polished, step=step, metrics=(before, after))
        print_line(f"Weights: {path}   In Python: cx.load({str(self.run)!r}, polished=True)")
        if not polished.met:
            raise SystemExit(1)
