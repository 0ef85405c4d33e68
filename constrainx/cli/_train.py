"""`constrainx train` and `constrainx validate`."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from constrainx.cli._command import RecipeCommand
from constrainx.cli._console import print_line, print_metrics
from constrainx.cli._run_trainer import finish, make_callbacks, name_run, run_as_process

if TYPE_CHECKING:
    from constrainx.recipes import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(RecipeCommand):
    """Train a recipe.

    Attributes:
        run: the folder of the run; runs/RECIPE/METHOD-seedSEED if left out.
        resume_if_possible: if the folder holds this run already, whether to continue it, from its
            newest good checkpoint or, if it has none yet, from the start.
        fail_if_stopped: whether to exit with code 75 instead of 0 if a signal asks the run to stop
            before its end, so that a scheduler starts it again.
        distributed: "auto", or HOST:PORT,PROCESSES,INDEX, to join other processes.
        fast_dev_run: take two steps, evaluate one batch, and write nothing.
        wandb: whether to send metrics to Weights & Biases.
        profile: steps to trace for TensorBoard and Perfetto, such as 20 or 20-24; the trace goes to
            the folder "profile" of the run.
    """

    run: pathlib.Path | None = None
    resume_if_possible: bool = False
    fail_if_stopped: bool = False
    distributed: str | None = None
    fast_dev_run: bool = False
    wandb: bool = False
    profile: str | None = None

    def execute(self, recipe: Recipe) -> None:
        """Trains it, and writes and prints the result."""
        run = self.run or name_run(recipe)

        def train() -> None:
            from constrainx.recipes import build_trainer, was_asked_to_stop
            from constrainx.runtime import STOPPED, Profile

            callbacks = make_callbacks(recipe, wandb=self.wandb)
            trainer = build_trainer(recipe, run=run, callbacks=callbacks)
            if self.profile is not None:
                profile = Profile.of_steps(self.profile, folder=run / "profile")
                trainer.logging = dataclasses.replace(trainer.logging, profile=profile)
            if self.resume_if_possible and (run / "config.json").exists():
                trainer.restore(fallback=True, or_start=True)
            result = trainer.fit(fast_dev_run=self.fast_dev_run, on_signal="return")
            if self.fast_dev_run:
                print_metrics("two steps ran without an error", result.metrics)
            else:
                finish(run, recipe, result)
                if self.fail_if_stopped and was_asked_to_stop(result):
                    raise SystemExit(STOPPED)

        run_as_process(train, distributed=self.distributed, run=run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validate(RecipeCommand):
    """Build everything that a recipe needs, and trace one step without computing anything."""

    def execute(self, recipe: Recipe) -> None:
        """Builds and traces it, and prints how large it is."""
        import jax

        from constrainx.recipes import build_trainer

        trainer = build_trainer(recipe, progress=False)
        trainer.validate()
        sizes = [leaf.size for leaf in jax.tree.leaves(trainer.state.parameters)]
        print_line(
            f"{recipe.name} {recipe.method}: {sum(sizes):,} parameters, {trainer.steps:,} steps, "
            f"constraints: {', '.join(trainer.constraint_names) or 'none'}. One step was traced."
        )
