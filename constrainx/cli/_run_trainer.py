"""Running a trainer from the command line, here or as one of several processes."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from constrainx.cli._console import print_line, print_metrics, report_user_errors

if TYPE_CHECKING:
    from constrainx.recipes import Recipe
    from constrainx.trainers import Result


def run_as_process(
    work: Callable[[], object], *, distributed: str | None = None, run: pathlib.Path | None = None
) -> None:
    """Does the work here, or joins other processes and does it as one of them.

    Args:
        work: what to do, once JAX can be used.
        distributed: how to join the other processes, see `constrainx.runtime.join`.
        run: the run's folder, for the message when a process is lost.
    """
    from constrainx.runtime import keep_memory, supervise

    keep_memory()
    use_compilation_cache()
    # Errors are reported inside, too, because the work may be done in a child process.
    with supervise(distributed, run=run), report_user_errors():
        work()


def name_run(recipe: Recipe) -> pathlib.Path:
    """The folder of a run for which none was given."""
    return pathlib.Path("runs") / recipe.name / f"{recipe.method}-seed{recipe.seed}"


def make_callbacks(recipe: Recipe, *, wandb: bool) -> list[Any]:
    """The callbacks that options ask for."""
    from constrainx.runtime import WeightsAndBiases

    return [WeightsAndBiases(project=recipe.name)] if wandb else []


def finish(run: pathlib.Path, recipe: Recipe, result: Result) -> None:
    """Writes the result of a run to its folder, and prints it.

    Exits with code 1 if a checkpoint could not be written, although the run went on.
    """
    import jax

    from constrainx.recipes import write_result
    from constrainx.runtime import parse_violation_metric

    record = write_result(run, recipe, result)
    if jax.process_index() > 0:
        return
    if record is None:
        is_saved = result.saved == result.step
        what = "Saved" if is_saved else f"Stopped at step {result.step}. Saved"
        where = (
            f"{what} at step {result.saved}." if result.saved is not None else "Nothing was saved."
        )
        print_line(f"{where} To continue: constrainx resume {run}")
    else:
        title = f"{result.reason} at step {result.step}, {result.seconds:.0f} s"
        print_metrics(title, record["metrics"])
        print_line(f"Run: {run}   Plots: constrainx report {run}")
        if any(parse_violation_metric(name) for name in record["metrics"]):
            print_line(f"Do the constraints hold? constrainx certify {run}")
    tell_unsaved(run, result)


def tell_unsaved(run: pathlib.Path, result: Result) -> None:
    """Raises if checkpoints could not be written, although the run went on."""
    from constrainx.runtime import CheckpointError

    if not result.unsaved:
        return
    steps = ", ".join(map(str, result.unsaved))
    newest = (
        "there is no other" if result.saved is None else f"the newest is of step {result.saved}"
    )
    raise CheckpointError(
        f"{run}: the checkpoints of steps {steps} could not be written; {newest}."
    )


def use_compilation_cache() -> None:
    """Keeps compiled programs for the next time, unless JAX has been told where to."""
    import jax

    if not jax.config.values["jax_compilation_cache_dir"]:
        base = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(base / "constrainx" / "xla"))
