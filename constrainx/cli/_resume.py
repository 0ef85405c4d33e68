"""`constrainx resume` and `constrainx eval`: what can be done with a run that exists."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Literal, TypeAlias

import tyro

from constrainx.cli._arguments import find_value, list_flags, parse_with_fields, take_subject
from constrainx.cli._command import Command, PlainCommand
from constrainx.cli._console import print_metrics
from constrainx.cli._run_trainer import finish, make_callbacks, run_as_process
from constrainx.errors import ArgumentError

WhichStep: TypeAlias = int | Literal["last", "best"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resume(Command):
    """Continue a run where it stopped, on any number of devices.

    Attributes:
        step: the checkpoint to continue from.
        fallback: if that checkpoint is damaged, whether to take an earlier one.
        strict: whether to refuse a checkpoint that was saved with other settings or of another
            model, instead of taking what matches.
        recipe: the file of the run's recipe, if it is your own: its code is executed.
        distributed: "auto", or HOST:PORT,PROCESSES,INDEX, to join other processes.
        wandb: whether to send metrics to Weights & Biases.
    """

    step: WhichStep = "last"
    fallback: bool = False
    strict: bool = True
    recipe: pathlib.Path | None = None
    distributed: str | None = None
    wandb: bool = False

    @classmethod
    def list_flags(cls) -> list[str]:
        """Also those that are fields of the run's recipe."""
        from constrainx.recipes import Recipe

        own = list_flags(Recipe, only=Recipe.list_changeable())
        return [*super().list_flags(), *own, "--steps", "--epochs", "--learning-rate"]

    @classmethod
    def start(cls, arguments: Sequence[str], *, name: str) -> None:
        """Reads the run's recipe first, whose values are the defaults of some options."""
        folder = take_subject(
            arguments, cls, command=name, metavar="RUN", about="the folder of a run"
        )
        from constrainx.recipes import build_trainer, read_recipe

        run = pathlib.Path(folder)
        before = read_recipe(run, file=find_value("recipe", arguments))
        options, recipe = parse_with_fields(
            cls,
            before,
            arguments[1:],
            command=f"{name} {folder}",
            description="Continue this run, or train it for longer. What is changed here is "
            "recorded in its config.json. Schedules that depend on the number of steps are those "
            "of the new number, read at the step from which the run continues.",
            fields=before.list_changeable(),
        )

        def resume() -> None:
            callbacks = make_callbacks(recipe, wandb=options.wandb)
            trainer = build_trainer(recipe, run=run, callbacks=callbacks)
            # A run that was killed before its first checkpoint starts again.
            or_start = options.step == "last"
            trainer.restore(
                options.step,
                fallback=options.fallback,
                or_start=or_start,
                strict=options.strict,
            )
            if trainer.step > trainer.steps:
                raise ArgumentError(
                    f"{trainer.steps} steps are fewer than the {trainer.step} steps that have been "
                    "taken already: ask for more, or continue from an earlier checkpoint with "
                    "`--step`."
                )
            finish(run, recipe, trainer.fit(on_signal="return"))

        run_as_process(resume, distributed=options.distributed, run=run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(PlainCommand):
    """Measure a checkpoint of a run on its held-out data.

    Attributes:
        run: the folder of a run.
        step: the checkpoint to measure.
        fallback: if that checkpoint is damaged, whether to take an earlier one.
        devices: how many devices to use; as the recipe says if left out.
        fsdp: how many devices share each large parameter; as the recipe says if left out.
        recipe: the file of the run's recipe, if it is your own: its code is executed.
    """

    run: tyro.conf.Positional[pathlib.Path]
    step: WhichStep = "last"
    fallback: bool = False
    devices: int | None = None
    fsdp: int | None = None
    recipe: pathlib.Path | None = None

    def execute(self) -> None:
        """Restores the checkpoint, and prints its metrics."""
        from constrainx.recipes import build_trainer, read_recipe

        place = {"devices": self.devices, "fsdp": self.fsdp}
        given = {name: value for name, value in place.items() if value is not None}
        recipe = read_recipe(self.run, file=self.recipe).but(**given)
        trainer = build_trainer(recipe, run=self.run)
        found = trainer.restore(self.step, fallback=self.fallback)
        print_metrics(f"{recipe.name} {recipe.method}, step {found}", trainer.evaluate())
