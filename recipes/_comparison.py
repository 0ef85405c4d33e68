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

from constrainx.errors import UserError
from constrainx.recipes._recipe import Recipe
from constrainx.trainers import Result

Results = dict[str, list[dict[str, Any]]]


class ComparisonError(UserError, ValueError):
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
        for table in self.tables(results):
            console.print(table)
        for remark in self._chosen.remarks(results):
            console.print(remark, highlight=False)
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
        if folder.exists():
            trainer.restore(fallback=True, or_start=True)
        result = trainer.fit()
        return write_result(folder, recipe, result)

    def tables(self, results: Results) -> list[Table]:
        """For a terminal: ours, and the paper's."""
        tables = []
        for title, headings, rows in self._content(results):
            table = Table(title=title, title_justify="left")
            for index, heading in enumerate(headings):
                table.add_column(heading, justify="right" if index else "left")
            for row in rows:
                table.add_row(*row)
            tables.append(table)
        return tables

    def markdown(self, results: Results) -> str:
        """For the docs, which include this file."""
        parts = []
        for title, headings, rows in self._content(results):
            lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
            body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
            parts.append(f"{title}.\n\n{body}\n")
        parts += [f"{remark}\n" for remark in self._chosen.remarks(results)]
        return "\n".join([*parts, machine()]) + "\n"

    @property
    def _title(self) -> str:
        plural = "s" if self.seeds > 1 else ""
        return f"{self.recipe.name}, size {self.size}, {self.seeds} seed{plural}, mean ± std"

    def _content(self, results: Results) -> list[tuple[str, list[str], list[list[str]]]]:
        """Titles, headings and rows: ours, and the paper's, if it has any."""
        names = self.recipe.figures
        ours = [
            [
                method,
                *(_spread(r["metrics"][name] for r in found) for name in names),
                f"{statistics.mean(r['seconds'] for r in found):.0f} s",
            ]
            for method, found in results.items()
        ]
        content = [(self._title, ["method", *names.values(), "time"], ours)]
        published = self._published
        known = [name for name in names if any(name in row for row in published.values())]
        if known:
            theirs = [
                [method, *(published[method].get(name, "") for name in known)]
                for method in results
                if method in published
            ]
            headings = ["method", *(names[name] for name in known)]
            content.append(("The paper's figures", headings, theirs))
        return content

    @property
    def _published(self) -> Mapping[str, Mapping[str, str]]:
        return self._chosen.published

    @property
    def _chosen(self) -> Recipe:
        return self.recipe.chosen(size=self.size, **self.fields)

    def _record(self, results: Results) -> dict[str, Any]:
        return {
            "recipe": self.recipe.name,
            "size": self.size,
            "seeds": self.seeds,
            "machine": machine(),
            "paper": {name: dict(row) for name, row in self._published.items()},
            "results": results,
        }


def write_result(folder: pathlib.Path, recipe: Recipe, result: Result) -> dict[str, Any] | None:
    """Measures, draws and notes down how a run ended; nothing, if it is to go on."""
    if result.reason.startswith("asked"):
        return None
    metrics = {**result.metrics, **recipe.measure(result.model)}
    if jax.process_index() == 0:
        recipe.draw(result.model, folder / "picture.png")
    record = {
        "config": json.loads(json.dumps(recipe.config)),
        "reason": result.reason,
        "step": result.step,
        "metrics": metrics,
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
