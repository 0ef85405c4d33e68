"""All methods of a recipe, several seeds, one table beside the paper's figures."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from constrainx.recipe import Recipe
from constrainx.trainers import Result

Results = dict[str, list[dict[str, Any]]]


class ComparisonError(ValueError):
    """A comparison cannot be made like this."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Which recipe, which methods, which seeds.

    Attributes:
        recipe: the class.
        methods: names of its methods.
        seeds: from 0 up to this.
        size: of the recipe.
        fields: other fields, the same for all.
        out: one folder a run goes here, and the table.
    """

    recipe: type[Recipe]
    methods: Sequence[str]
    seeds: int
    size: str
    fields: Mapping[str, Any]
    out: pathlib.Path

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ComparisonError(f"--seeds must be at least 1, got {self.seeds}.")
        for method in self.methods:
            self.recipe.chosen(method=method, size=self.size, **self.fields)

    def run(self, console: Console) -> Results:
        """Trains whatever is not there yet, and writes the table.

        A run that was interrupted goes on where it was; one that ended is not repeated.
        """
        results: Results = {method: [] for method in self.methods}
        for method in self.methods:
            for seed in range(self.seeds):
                result = self._one(method, seed)
                if result is None:
                    raise SystemExit(0)
                results[method].append(result)
        console.print(self.table(results))
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "compare.md").write_text(self.markdown(results))
        (self.out / "compare.json").write_text(json.dumps(self._record(results), indent=1) + "\n")
        return results

    def runs(self) -> list[pathlib.Path]:
        """The folders of all runs."""
        return [self._folder(m, seed) for m in self.methods for seed in range(self.seeds)]

    def _folder(self, method: str, seed: int) -> pathlib.Path:
        return self.out / f"{method}-seed{seed}"

    def _one(self, method: str, seed: int) -> dict[str, Any] | None:
        """The result of one run, or None if it was asked to stop."""
        folder = self._folder(method, seed)
        path = folder / "result.json"
        recipe = self.recipe.chosen(method=method, size=self.size, seed=seed, **self.fields)
        if path.exists():
            stored = json.loads(path.read_text())
            wanted = json.loads(json.dumps(recipe.config))
            if stored["config"] != wanted:
                raise ComparisonError(
                    f"{folder} has a run with other settings. Choose another folder with --out."
                )
            return stored
        trainer = recipe.trainer(run=folder)
        if (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir()):
            trainer.restore(fallback=True)
        result = trainer.fit()
        return write_result(folder, recipe, result)

    def table(self, results: Results) -> Table:
        """For a terminal."""
        headings, rows = self._rows(results)
        table = Table(title=self._title, title_justify="left")
        for index, heading in enumerate(headings):
            table.add_column(heading, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        return table

    def markdown(self, results: Results) -> str:
        """For the docs, which include this file."""
        headings, rows = self._rows(results)
        lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"{self._title}.\n\n{body}\n\n{machine()}\n"

    @property
    def _title(self) -> str:
        plural = "s" if self.seeds > 1 else ""
        return f"{self.recipe.name}, size {self.size}, {self.seeds} seed{plural}, mean ± std"

    def _rows(self, results: Results) -> tuple[list[str], list[list[str]]]:
        paper = self.recipe.paper
        names = self.recipe.figures
        headings = ["method", *names.values(), "time"]
        headings += [f"paper: {label}" for label in names.values()] if paper else []
        rows = []
        for method, found in results.items():
            row = [method, *(_spread(r["metrics"][name] for r in found) for name in names)]
            row.append(f"{statistics.mean(r['seconds'] for r in found):.0f} s")
            if paper:
                row += [paper.get(method, {}).get(name, "") for name in names]
            rows.append(row)
        return headings, rows

    def _record(self, results: Results) -> dict[str, Any]:
        return {
            "recipe": self.recipe.name,
            "size": self.size,
            "seeds": self.seeds,
            "machine": machine(),
            "paper": dict(self.recipe.paper),
            "results": results,
        }


def write_result(folder: pathlib.Path, recipe: Recipe, result: Result) -> dict[str, Any] | None:
    """Notes down how a run ended; nothing, if it is to go on."""
    if result.reason.startswith("asked"):
        return None
    record = {
        "config": json.loads(json.dumps(recipe.config)),
        "reason": result.reason,
        "step": result.step,
        "metrics": result.metrics,
        "seconds": result.seconds,
    }
    if jax.process_index() == 0:
        (folder / "result.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def machine() -> str:
    """What the figures were measured on."""
    devices = jax.devices()
    what = f"{len(devices)} × {devices[0].device_kind}"
    if devices[0].platform == "cpu":
        what = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    return f"Measured on {what}, jax {jax.__version__}."


def _spread(values: Iterable[float]) -> str:
    listed = list(values)
    mean = statistics.mean(listed)
    if len(listed) == 1 or not math.isfinite(mean):
        return f"{mean:.3g}"
    return f"{mean:.3g} ± {statistics.stdev(listed):.2g}"
