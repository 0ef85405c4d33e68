"""`constrainx` on the command line."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, Literal, TypeAlias

import tyro
from rich.console import Console
from rich.table import Table

from constrainx.cli._arguments import parse_with_fields
from constrainx.cli._console import quiet, user_errors

app = tyro.extras.SubcommandApp()
WhichStep: TypeAlias = int | Literal["last", "best"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How to launch a run.

    Attributes:
        run: the run's folder; runs/RECIPE/METHOD-seedSEED if left out.
        distributed: "auto", or HOST:PORT,PROCESSES,INDEX, to join other processes.
        fast_dev_run: two steps and one batch of the evaluation, without a folder.
        wandb: whether to send metrics to Weights & Biases.
    """

    run: pathlib.Path | None = None
    distributed: str | None = None
    fast_dev_run: bool = False
    wandb: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What to compare.

    Attributes:
        methods: which of the recipe's methods; all that it wants compared if left out.
        seeds: how many, from 0 on.
        out: where runs and tables go; runs/compare/RECIPE-SIZE if left out.
    """

    methods: tuple[str, ...] = ()
    seeds: int = 1
    out: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    """Nothing to choose."""


def main() -> None:
    """Runs the command that the arguments name."""
    arguments = sys.argv[1:] or ["--help"]
    quiet()
    with user_errors():
        command, rest = arguments[0], arguments[1:]
        if command in RECIPE_COMMANDS and rest and not rest[0].startswith("-"):
            RECIPE_COMMANDS[command](rest[0], rest[1:])
            return
        app.cli(
            prog="constrainx",
            description="Train neural networks that must obey constraints.",
            args=arguments,
        )


@app.command
def quickstart(epochs: int = 100, out: pathlib.Path = pathlib.Path("results/quickstart")) -> None:
    """Trains a network on the moment of inertia, with and without the O(3) constraint.

    Args:
        epochs: passes over the training data.
        out: where the plots and the figures go.
    """
    from constrainx.cli._quickstart import run

    _compilation_cache()
    run(epochs=epochs, out=out)


@app.command(name="list")
def list_() -> None:
    """Lists the recipes."""
    from constrainx.recipes import all_recipes, summarize

    table = Table(box=None, pad_edge=False)
    for heading in ("recipe", "methods", "what it shows"):
        table.add_column(heading)
    for name, recipe in all_recipes().items():
        table.add_row(name, ", ".join(recipe.methods), summarize(recipe))
    Console().print(table)


@app.command
def train(recipe: tyro.conf.Positional[str]) -> None:
    """Trains a recipe: `constrainx train RECIPE --help` shows its fields.

    Args:
        recipe: its name, or the file of your own, such as my_recipe.py.
    """
    _train(recipe, [])


@app.command
def validate(recipe: tyro.conf.Positional[str]) -> None:
    """Builds everything that a recipe needs, and traces one step on shapes alone.

    Args:
        recipe: its name, or the file of your own.
    """
    _validate(recipe, [])


@app.command
def compare(recipe: tyro.conf.Positional[str]) -> None:
    """Trains all methods of a recipe with several seeds: one table, beside the paper's figures.

    Args:
        recipe: its name, or the file of your own.
    """
    _compare(recipe, [])


@app.command
def resume(
    run: tyro.conf.Positional[pathlib.Path],
    step: WhichStep = "last",
    fallback: bool = False,
    devices: int | None = None,
    fsdp: int = 1,
    distributed: str | None = None,
) -> None:
    """Goes on with a run where it was, on any number of devices.

    Args:
        run: the run's folder.
        step: the checkpoint to go on from.
        fallback: whether to take the one before if that is damaged.
        devices: how many to use; all if left out.
        fsdp: how many devices share each large parameter.
        distributed: "auto", or HOST:PORT,PROCESSES,INDEX, to join other processes.
    """

    def go() -> None:
        recipe, trainer = _of_run(run, devices=devices, fsdp=fsdp)
        trainer.restore(step, fallback=fallback, or_start=step == "last")
        _finish(run, recipe, trainer.fit())

    _launched(go, distributed, run)


@app.command(name="eval")
def eval_(
    run: tyro.conf.Positional[pathlib.Path],
    step: WhichStep = "last",
    fallback: bool = False,
    devices: int | None = None,
) -> None:
    """Measures a checkpoint of a run on its held-out data.

    Args:
        run: the run's folder.
        step: which checkpoint.
        fallback: whether to take the one before if that is damaged.
        devices: how many to use; all if left out.
    """
    recipe, trainer = _of_run(run, devices=devices)
    found = trainer.restore(step, fallback=fallback)
    _print_metrics(f"{recipe.name} {recipe.method}, step {found}", trainer.evaluate())


@app.command
def report(
    runs: tyro.conf.Positional[tuple[pathlib.Path, ...]],
    out: pathlib.Path = pathlib.Path("results/report"),
) -> None:
    """Draws runs: loss, violations, solver iterations, time; one HTML page, and PNGs.

    Args:
        runs: folders of runs.
        out: where the page goes.
    """
    from constrainx.report import write

    Console().print(f"Page: {write(runs, out=out)}", soft_wrap=True)


@app.command
def cp(recipe: tyro.conf.Positional[str], file: tyro.conf.Positional[pathlib.Path]) -> None:
    """Copies a recipe's file, to start your own from it.

    Args:
        recipe: its name.
        file: where to.
    """
    from constrainx.recipes import RecipeError, find

    source = pathlib.Path(sys.modules[find(recipe).__module__].__file__ or "")
    if file.exists():
        raise RecipeError(f"{file} is there already; choose another name.")
    shutil.copyfile(source, file)
    Console().print(f"Wrote {file}. Train it: constrainx train {file}", soft_wrap=True)


@app.command
def data(
    action: tyro.conf.Positional[Literal["list", "prepare"]],
    name: tyro.conf.Positional[str | None] = None,
    data_dir: pathlib.Path | None = None,
) -> None:
    """Lists the data sets that are prepared, or prepares one.

    Args:
        action: "list" or "prepare".
        name: of a TFDS data set, such as fashion_mnist.
        data_dir: where they are; TFDS_DATA_DIR or ~/tensorflow_datasets if left out.
    """
    from constrainx import data as sets

    if action == "prepare":
        if name is None:
            raise sets.PreparationError("name the data set: constrainx data prepare fashion_mnist.")
        sets.prepare(name, data_dir)
        Console().print(f"{name} is ready.")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("data set", "splits", "MB", "folder"):
        table.add_column(heading)
    for found in sets.list_prepared(data_dir):
        splits = ", ".join(f"{split} {count}" for split, count in found.splits.items())
        table.add_row(found.name, splits, f"{found.bytes / 1e6:.0f}", str(found.path))
    Console().print(table if table.row_count else "No data sets yet: constrainx data prepare NAME.")


@app.command
def completion(shell: tyro.conf.Positional[Literal["bash", "zsh"]]) -> None:
    """Prints a script for the shell: source <(constrainx completion bash).

    Args:
        shell: which one.
    """
    from constrainx.cli._completion import script

    options = {"train": TrainOptions, "compare": CompareOptions}
    flags = {
        command: [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(kind)]
        for command, kind in options.items()
    }
    sys.stdout.write(script(shell, commands=COMMANDS, options=flags))


@app.command
def info() -> None:
    """Shows versions and devices, for bug reports."""
    import jax

    table = Table(show_header=False, box=None)
    table.add_row("python", platform.python_version())
    for name in ("constrainx", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain"):
        table.add_row(name, metadata.version(name))
    table.add_row("devices", ", ".join(str(device) for device in jax.devices()))
    Console().print(table)


def _train(name: str, arguments: Sequence[str]) -> None:
    recipe, options = _parse_recipe("train", name, TrainOptions, arguments)
    run = options.run or pathlib.Path("runs") / recipe.name / f"{recipe.method}-seed{recipe.seed}"

    def go() -> None:
        from constrainx.runtime import WeightsAndBiases

        listeners = [WeightsAndBiases(project=recipe.name)] if options.wandb else []
        trainer = recipe.trainer(run=run, callbacks=listeners)
        result = trainer.fit(fast_dev_run=options.fast_dev_run)
        if options.fast_dev_run:
            _print_metrics("two steps went well", result.metrics)
        else:
            _finish(run, recipe, result)

    _launched(go, options.distributed, run)


def _validate(name: str, arguments: Sequence[str]) -> None:
    import jax

    recipe, _ = _parse_recipe("validate", name, ValidateOptions, arguments)
    trainer = recipe.trainer(progress=False)
    trainer.validate()
    sizes = [leaf.size for leaf in jax.tree.leaves(trainer.state.parameters)]
    Console().print(
        f"{recipe.name} {recipe.method}: {sum(sizes):,} parameters, {trainer.steps:,} steps, "
        f"constraints: {', '.join(trainer.constraint_names) or 'none'}. One step was traced.",
        highlight=False,
        soft_wrap=True,
    )


def _compare(name: str, arguments: Sequence[str]) -> None:
    from constrainx.recipes import Comparison
    from constrainx.report import write

    recipe, options = _parse_recipe(
        "compare", name, CompareOptions, arguments, without=("method", "seed")
    )
    _compilation_cache()
    out = options.out or pathlib.Path("runs/compare") / f"{recipe.name}-{recipe.size}"
    comparison = Comparison(
        recipe=recipe,
        methods=options.methods,
        seeds=options.seeds,
        out=out,
    )
    if comparison.run(Console()) is None:
        return
    page = write(comparison.runs(), out=out / "report")
    Console().print(f"Table: {out / 'compare.md'}   Page: {page}", soft_wrap=True)


RECIPE_COMMANDS: dict[str, Callable[[str, Sequence[str]], None]] = {
    "train": _train,
    "validate": _validate,
    "compare": _compare,
}
COMMANDS = (
    "quickstart", "list", "train", "resume", "eval", "compare", "report", "cp", "validate", "data",
    "completion", "info",
)  # fmt: skip


def _parse_recipe(
    command: str, name: str, options: type, arguments: Sequence[str], *, without: Sequence[str] = ()
) -> tuple[Any, Any]:
    """The recipe with the fields given, and the command's own options."""
    from constrainx.recipes import find, summarize

    recipe = find(name)
    choices = f"Methods: {', '.join(recipe.methods)}. Sizes: smoke, cpu, full."
    parsed: Any
    parsed, chosen = parse_with_fields(
        options,
        recipe(),
        arguments,
        command=f"{command} {name}",
        description=f"{summarize(recipe)} {choices}",
        fields=[field for field in recipe.field_names() if field not in without],
    )
    return chosen, parsed


def _of_run(run: pathlib.Path, **place: Any) -> tuple[Any, Any]:
    """The recipe of a run, and a trainer built from it."""
    from constrainx.recipes import find
    from constrainx.runtime import RunError, read_config

    config = read_config(run)
    if "recipe" not in config:
        raise RunError(
            f"{run} was not started from a recipe: build its Trainer in Python and call restore()."
        )
    recipe = find(config["recipe"]).from_config(config, **place)
    return recipe, recipe.trainer(run=run)


def _launched(go: Callable[[], None], distributed: str | None, run: pathlib.Path) -> None:
    """Runs it here, or as one of several processes."""
    from constrainx.runtime import supervise

    _compilation_cache()
    # Also in there, because it may be another process that goes on.
    with supervise(distributed, run=run), user_errors():
        go()


def _finish(run: pathlib.Path, recipe: Any, result: Any) -> None:
    import jax

    from constrainx.recipes import write_result

    record = write_result(run, recipe, result)
    if jax.process_index() > 0:
        return
    if record is None:
        Console().print(
            f"Saved at step {result.step}. Go on with: constrainx resume {run}", soft_wrap=True
        )
        return
    _print_metrics(
        f"{result.reason} at step {result.step}, {result.seconds:.0f} s", record["metrics"]
    )
    Console().print(f"Run: {run}   Plots: constrainx report {run}", soft_wrap=True)


def _print_metrics(title: str, metrics: dict[str, float]) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)


def _compilation_cache() -> None:
    import jax

    if not jax.config.values["jax_compilation_cache_dir"]:
        base = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(base / "constrainx" / "xla"))
