"""Several methods of a recipe, several seeds, one table beside the paper's figures."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
from rich.console import Console
from rich.text import Text

from constrainx.errors import UserError, check_choice
from constrainx.recipes._build import build_trainer
from constrainx.recipes._recipe import OVERSIGHT, Recipe
from constrainx.recipes._resolve import RECORDED
from constrainx.recipes._result import read_result, write_result
from constrainx.recipes._tables import (
    Grid,
    Results,
    join_lines,
    tabulate_published,
    tabulate_results,
)
from constrainx.runtime import read_config

Reuse: TypeAlias = Literal["unchanged", "all"]


class ComparisonError(UserError, ValueError):
    """A comparison cannot be made like this."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Which recipe, which methods, which seeds.

    Attributes:
        recipe: what all runs have in common; its method and seed are replaced.
        methods: names of its methods; those that the recipe lists for comparison if empty.
        seeds: how many, from 0 on.
        out: the folder for the runs, one folder each, and for the table.
        reuse: which runs in that folder to use again: those of "unchanged" code, or "all" of them,
            whatever the source of the recipe and of constrainx was.
    """

    recipe: Recipe
    methods: Sequence[str] = ()
    seeds: int = 1
    out: pathlib.Path
    reuse: Reuse = "unchanged"

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ComparisonError(f"`seeds` must be at least 1, got {self.seeds}.")
        check_choice("reuse", self.reuse, get_args(Reuse), owner="Comparison")
        methods = (
            self.methods
            or self.recipe.compared
            or tuple(self.recipe.methods)
            or (self.recipe.method,)
        )
        object.__setattr__(self, "methods", tuple(methods))
        for method in methods:
            self.recipe.but(method=method)  # raises now if there is no such method

    def run(self, console: Console) -> Results | None:
        """Trains what has no result yet, and prints and writes the table.

        A run that was interrupted continues where it was; one that has ended is not repeated. Both
        only if they are of the same code; otherwise the old run is set aside, in the folder
        "earlier". What was used again is printed above the table.

        Returns:
            One record for each method and seed; None if a run was asked to stop.
        """
        results: Results = {method: [] for method in self.methods}
        for method in self.methods:
            for seed in range(self.seeds):
                result = self._train(method, seed, console)
                if result is None:
                    return None
                results[method].append(result)
        for grid in self.tabulate(results):
            console.print(grid.draw())
        for remark in self.recipe.remarks(results):
            console.print(remark, highlight=False, markup=False)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "compare.md").write_text(self.write_markdown(results))
        (self.out / "compare.json").write_text(json.dumps(self._record(results), indent=1) + "\n")
        return results

    def runs(self) -> list[pathlib.Path]:
        """The folders of all runs."""
        return [self._folder(m, seed) for m in self.methods for seed in range(self.seeds)]

    def tabulate(self, results: Results) -> list[Grid]:
        """The table of the results and, if the paper has the same figures, one of those."""
        metrics = (name for runs in results.values() for run in runs for name in run["metrics"])
        headings = self.recipe.figures or {name: name for name in metrics}
        ours = tabulate_results(self._title, results, headings)
        theirs = tabulate_published(self.recipe.published, results, headings)
        return [ours] if theirs is None else [ours, theirs]

    def write_markdown(self, results: Results) -> str:
        """The tables for the docs, which include this text."""
        remarks = [f"{remark}\n" for remark in self.recipe.remarks(results)]
        tables = [grid.write() for grid in self.tabulate(results)]
        return "\n".join([*tables, *remarks, describe_machine()]) + "\n"

    def _folder(self, method: str, seed: int) -> pathlib.Path:
        return self.out / f"{method}-seed{seed}"

    def _train(self, method: str, seed: int, console: Console) -> dict[str, Any] | None:
        """The result of one run; None if it was asked to stop."""

        def say(what: str) -> None:
            text = Text(join_lines(f"{method}, seed {seed}: {what}"))
            console.print(text, soft_wrap=True, highlight=False)

        folder = self._folder(method, seed)
        recipe = self.recipe.but(method=method, seed=seed)
        if not (folder / "config.json").exists():
            return write_result(
                folder, recipe, build_trainer(recipe, run=folder).fit(on_signal="return")
            )
        result = read_result(folder)
        stored = result.get("config", {}) if result else read_config(folder)
        if _drop_oversight(stored) != _drop_oversight(recipe.config):
            raise ComparisonError(
                f"{folder} has a run with other settings. Choose another folder with `--out`."
            )
        changed = _find_changed_code(stored, recipe)
        if changed and self.reuse == "unchanged":
            aside = _set_aside(folder)
            say(
                f"trains anew, because {changed} changed since; the old run is in {aside}. "
                "`--reuse all` uses such runs as they are."
            )
            return write_result(
                folder, recipe, build_trainer(recipe, run=folder).fit(on_signal="return")
            )
        caveat = f", although {changed} changed since" if changed else ""
        if result is not None:
            say(f"reused the result of step {result['step']}{caveat}.")
            return result
        say(f"continued{caveat}.")
        trainer = build_trainer(recipe, run=folder)
        trainer.restore(fallback=True, or_start=True)
        return write_result(folder, recipe, trainer.fit(on_signal="return"))

    @property
    def _title(self) -> str:
        plural = "s" if self.seeds > 1 else ""
        recipe = self.recipe
        return f"{recipe.name}, size {recipe.size}, {self.seeds} seed{plural}, mean ± std"

    def _record(self, results: Results) -> dict[str, Any]:
        return {
            "recipe": self.recipe.name,
            "size": self.recipe.size,
            "seeds": self.seeds,
            "machine": describe_machine(),
            "paper": {name: dict(row) for name, row in self.recipe.published.items()},
            "results": results,
        }


def describe_machine() -> str:
    """What the figures were measured on."""
    devices = jax.devices()
    what = f"{len(devices)} × {devices[0].device_kind}"
    if devices[0].platform == "cpu":
        what = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    return f"Measured on {what}, jax {jax.__version__}."


def _drop_oversight(config: Mapping[str, Any]) -> dict[str, Any]:
    """What defines a result, apart from the code."""
    other = (*OVERSIGHT, *RECORDED)
    kept = {name: value for name, value in config.items() if name not in other}
    return json.loads(json.dumps(kept))


def _find_changed_code(stored: Mapping[str, Any], recipe: Recipe) -> str:
    """What of the code is not as it was when a run was trained, in words."""
    # A file that has only moved is the same code.
    before, now = stored.get("source", {}), recipe.config["source"]
    names = {"recipe": "the recipe's source", "constrainx": "constrainx"}
    changed = [words for name, words in names.items() if before.get(name) != now[name]]
    return f"{' and '.join(changed)} {'have' if len(changed) > 1 else 'has'}" if changed else ""


def _set_aside(folder: pathlib.Path) -> pathlib.Path:
    """Moves a run into the folder "earlier" next to it, under a name that is free."""
    earlier = folder.parent / "earlier"
    earlier.mkdir(exist_ok=True)
    number = 1
    while (target := earlier / f"{folder.name}-{number}").exists():
        number += 1
    return folder.rename(target)
