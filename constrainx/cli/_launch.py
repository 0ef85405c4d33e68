"""`constrainx launch`."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from constrainx.cli._arguments import keep_others, list_flags, take_subject
from constrainx.cli._command import Command, read_with_recipe
from constrainx.cli._console import print_line
from constrainx.cli._run_trainer import name_run
from constrainx.errors import ArgumentError, check_choice
from constrainx.launch import Job, Kubernetes, Scheduler, SkyPilot, Slurm, submit

if TYPE_CHECKING:
    from constrainx.recipes import Recipe

SCHEDULERS: dict[str, type] = {"slurm": Slurm, "kubernetes": Kubernetes, "skypilot": SkyPilot}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch(Command):
    """Write a job file that trains a recipe on many nodes, and submit it if asked to.

    Attributes:
        nodes: how many.
        gpus_per_node: how many each of them has; 0 for CPUs alone.
        name: of the job; that of the recipe if left out.
        run: the folder of the run; runs/RECIPE/METHOD-seedSEED, or the same on the shared volume,
            if left out.
        out: the file to write; one in the folder jobs if left out.
        submit: whether to submit it, too.
        wandb: whether to send metrics to Weights & Biases.
    """

    takes_recipe: ClassVar[bool] = True
    first_words: ClassVar[Sequence[str]] = tuple(SCHEDULERS)

    nodes: int = 1
    gpus_per_node: int = 8
    name: str | None = None
    run: pathlib.Path | None = None
    out: pathlib.Path | None = None
    submit: bool = False
    wandb: bool = False

    @classmethod
    def list_flags(cls) -> list[str]:
        """With those of all schedulers."""
        kinds = (cls, *SCHEDULERS.values())
        return list(dict.fromkeys(flag for kind in kinds for flag in list_flags(kind)))

    @classmethod
    def start(cls, arguments: Sequence[str], *, name: str) -> None:
        """Checks all options as `train` would, and passes those of the recipe on as written."""
        about = f"one of {', '.join(SCHEDULERS)}"
        word = take_subject(arguments, cls, command=name, metavar="SCHEDULER", about=about)
        check_choice("scheduler", word, SCHEDULERS, owner=name)
        kind = dataclasses.make_dataclass(
            "Options",
            [
                ("launch", Annotated[cls, tyro.conf.arg(name="")]),
                ("scheduler", Annotated[SCHEDULERS[word], tyro.conf.arg(name="")]),
            ],
            namespace={"__doc__": cls.__doc__},
        )
        # Recipes do not choose their devices here: the job uses all that its nodes have.
        made: tuple[str, Any, Recipe] = read_with_recipe(
            kind, arguments[1:], name=f"{name} {word}", without=("devices",)
        )
        recipe_name, options, recipe = made
        options.launch.execute(
            options.scheduler,
            recipe,
            recipe_name=recipe_name,
            options=keep_others(kind, arguments[2:]),
            written_by=" ".join(shlex.join(["constrainx", name, *arguments]).splitlines()),
        )

    def execute(
        self,
        scheduler: Scheduler,
        recipe: Recipe,
        *,
        recipe_name: str,
        options: Sequence[str],
        written_by: str,
    ) -> None:
        """Writes the job file, and submits it or says how to.

        Args:
            scheduler: for which to write it.
            recipe: what to train.
            recipe_name: how `train` finds the recipe.
            options: how its fields were given.
            written_by: the whole command.
        """
        job = Job(
            name=self.name or recipe.name,
            recipe=recipe_name,
            options=[*options, "--wandb"] if self.wandb else options,
            run=self.run or scheduler.place(name_run(recipe)),
            nodes=self.nodes,
            gpus=self.gpus_per_node,
            batch=getattr(recipe, "batch", None),
            fsdp=recipe.fsdp,
            written_by=written_by,
        )
        file = self.out or pathlib.Path("jobs") / f"{job.name}{scheduler.suffix}"
        _write(file, scheduler.write(job))
        if recipe.save_every is None:
            print_line(
                "Note: the run is saved only at its end and on SIGTERM, so one that is killed "
                "starts over. `--save-every STEPS` saves on the way."
            )
        if self.submit:
            print_line(f"Wrote {file}.")
            submit(scheduler, file)
        else:
            print_line(f"Wrote {file}. Submit it: {shlex.join(scheduler.submission(file))}")


def _write(file: pathlib.Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        raise ArgumentError(f"`--out {file}` cannot be written: {error.strerror}.") from error
