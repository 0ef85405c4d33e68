"""Several methods of a recipe, several seeds, one table beside the paper's figures."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax
from rich.console import Console

from constrainx.errors import check_choice
from constrainx.recipes._equal_time import Share, share_time
from constrainx.recipes._paired import tabulate_pairs
from constrainx.recipes._recipe import Recipe
from constrainx.recipes._reuse import ComparisonError, Reuse, train_or_reuse
from constrainx.recipes._sweep import (
    RULES,
    SWEEP_SEED,
    Rule,
    as_fields,
    check_sweeps,
    choose,
    describe_values,
    spread,
)
from constrainx.recipes._sweep_table import Tried, tabulate_tried
from constrainx.recipes._tables import (
    Grid,
    Results,
    tabulate_published,
    tabulate_results,
    tabulate_shares,
)
from constrainx.report import Point, draw_front, draw_over_time, load


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
        seconds: how long every method takes steps for, as their time is measured before; None for
            as many steps as the recipe says.
        equal_time: instead, as long as the first method takes for the steps that the recipe says.
        sweep: how many values to try for each method for which the recipe says what to sweep; 0 for
            those of the recipe.
        choose: what makes a value the best: the smallest "error", "violation" or their "product",
            on held-out training data, or on test data of a seed that is not reported.
    """

    recipe: Recipe
    methods: Sequence[str] = ()
    seeds: int = 1
    out: pathlib.Path
    reuse: Reuse = "unchanged"
    seconds: float | None = None
    equal_time: bool = False
    sweep: int = 0
    choose: Rule = "error"

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= SWEEP_SEED:
            least = "at least 1" if self.seeds < 1 else f"at most {SWEEP_SEED}"
            raise ComparisonError(f"`seeds` must be {least}, got {self.seeds}.")
        check_choice("reuse", self.reuse, get_args(Reuse), owner="Comparison")
        check_choice("choose", self.choose, tuple(RULES), owner="Comparison")
        if self.sweep < 0:
            raise ComparisonError(f"`sweep` must be at least 0, got {self.sweep}.")
        if self.seconds is not None and self.seconds <= 0:
            raise ComparisonError(f"`seconds` must be more than 0, got {self.seconds}.")
        if self.seconds is not None and self.equal_time:
            raise ComparisonError(
                "`seconds` says how much time there is, and `equal_time` takes that of the first "
                "method: leave out one of them."
            )
        methods = (
            self.methods
            or self.recipe.compared
            or tuple(self.recipe.methods)
            or (self.recipe.method,)
        )
        object.__setattr__(self, "methods", tuple(methods))
        for method in methods:
            self.recipe.but(method=method)  # raises now if there is no such method
        lengths = [name for name in self.recipe.stretches if self.recipe.was_given(name)]
        if self.seconds is not None and lengths:
            raise ComparisonError(
                f"`{lengths[0]}` and `seconds` both say how long a run is: leave out one of them."
            )
        if self.sweep:
            check_sweeps(self.recipe, self.methods)

    def run(self, console: Console) -> Results | None:
        """Trains what has no result yet, and prints and writes the tables and pictures.

        A run that was interrupted continues where it was; one that has ended is not repeated. Both
        only if they are of the same code; otherwise the old run is set aside, in the folder
        "earlier". What was used again is printed above the table.

        Returns:
            One record for each method and seed; None if a run was asked to stop.
        """
        shares = self._share_time()
        tried = self._try_values(shares, console)
        if tried is None:
            return None
        results: Results = {method: [] for method in self.methods}
        for method in self.methods:
            for seed in range(self.seeds):
                chosen = next((one.values for one in tried if one.serves(method)), {})
                recipe = self._vary(method, shares, seed=seed, **chosen)
                label = f"{method}, seed {seed}"
                folder = self._folder(method, seed)
                result = train_or_reuse(folder, recipe, label, console, reuse=self.reuse)
                if result is None:
                    return None
                results[method].append(result)
        grids = self.tabulate(results, shares, tried)
        for grid in grids:
            for part in grid.fit(console.width):
                console.print(part.draw())
        for remark in self._remarks(results, tried):
            console.print(remark, highlight=False, markup=False)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "compare.md").write_text(self.write_markdown(results, shares, tried))
        record = self._record(results, shares, tried)
        (self.out / "compare.json").write_text(json.dumps(record, indent=1) + "\n")
        self._draw(results, tried)
        return results

    def runs(self) -> list[pathlib.Path]:
        """The folders of all runs."""
        return [self._folder(m, seed) for m in self.methods for seed in range(self.seeds)]

    def tabulate(
        self, results: Results, shares: Mapping[str, Share] = {}, tried: Sequence[Tried] = ()
    ) -> list[Grid]:
        """The table of the results, and those of what else there is to say about them.

        Differences from the first method for several seeds, how the time was shared, which values
        were tried, and the paper's figures.
        """
        metrics = (name for runs in results.values() for run in runs for name in run["metrics"])
        headings = self.recipe.figures or {name: name for name in metrics}
        axes = self.axes(results)
        grids = [
            tabulate_results(self._title, results, headings),
            tabulate_pairs(results, axes, headings) if axes else None,
            tabulate_shares(shares, results) if shares else None,
            tabulate_tried(tried, axes, headings) if tried else None,
            tabulate_published(self.recipe.published, results, headings),
        ]
        return [grid for grid in grids if grid is not None]

    def write_markdown(
        self, results: Results, shares: Mapping[str, Share] = {}, tried: Sequence[Tried] = ()
    ) -> str:
        """The tables for the docs, which include this text."""
        remarks = [f"{remark}\n" for remark in self._remarks(results, tried)]
        tables = [grid.write() for grid in self.tabulate(results, shares, tried)]
        return "\n".join([*tables, *remarks, describe_machine()]) + "\n"

    def axes(self, results: Results) -> list[str]:
        """The metric that is called error and, if there is one, that called violation."""
        known = dict.fromkeys(
            name for runs in results.values() for run in runs for name in run["metrics"]
        )
        wanted = self.recipe.axes or [*self.recipe.figures][:2] or [*known][:2]
        return [name for name in wanted if name in known]

    def _vary(self, method: str, shares: Mapping[str, Share], **fields: Any) -> Recipe:
        recipe = self.recipe.but(method=method, **fields)
        return shares[method].apply(recipe) if method in shares else recipe

    def _share_time(self) -> dict[str, Share]:
        if self.seconds is None and not self.equal_time:
            return {}
        path = self.out / "equal-time.json"
        return share_time(self.recipe, self.methods, path, seconds=self.seconds)

    def _try_values(self, shares: Mapping[str, Share], console: Console) -> list[Tried] | None:
        """All values that were tried, with the best of each method marked."""
        tried: list[Tried] = []
        for method in self.methods if self.sweep else ():
            ranges = self.recipe.sweeps.get(method)
            if not ranges:
                continue
            found: list[dict[str, Any]] = []
            plans = [
                as_fields(self.recipe.but(method=method), values)
                for values in spread(ranges, self.sweep)
            ]
            # Whole numbers may fall together.
            plans = list({tuple(values.items()): values for values in plans}.values())
            for values in plans:
                held_out = dict(self.recipe.validation)
                recipe = self._vary(method, shares, seed=SWEEP_SEED, **held_out, **values)
                words = describe_values(values)
                folder = self.out / "sweep" / f"{method} {words}".replace(", ", " ")
                label = f"{method}, {words}, to choose"
                result = train_or_reuse(
                    folder, recipe, label, console, reuse=self.reuse, may_fail=True
                )
                if result is None:
                    return None
                found.append(result)
            axes = self.axes({method: found})
            best = choose(found, axes, self.choose) if axes else 0
            tried += [
                Tried(method, values, run, is_best=index == best)
                for index, (values, run) in enumerate(zip(plans, found, strict=True))
            ]
        return tried

    def _remarks(self, results: Results, tried: Sequence[Tried]) -> list[str]:
        remarks = self.recipe.remarks(results)
        if tried:
            where = (
                f"on held-out training data and seed {SWEEP_SEED}"
                if self.recipe.validation
                else f"on seed {SWEEP_SEED}"
            )
            remarks = [
                *remarks,
                f"Values were chosen {where}, which is not among the seeds above, by the "
                f"{RULES[self.choose]}, from {self.sweep} for each method that has any.",
            ]
        return remarks

    def _draw(self, results: Results, tried: Sequence[Tried]) -> None:
        """Draws every run as a point, and how the error fell over time."""
        axes = self.axes(results)
        if not axes:
            return
        headings = [self.recipe.figures.get(name, name) for name in axes]
        points = [
            Point(method, tuple(run["metrics"].get(name) for name in axes), run["seconds"], True)
            for method, runs in results.items()
            for run in runs
        ]
        points += [
            Point(
                one.method,
                tuple(one.run["metrics"].get(name) for name in axes),
                one.run["seconds"],
                False,
            )
            for one in tried
        ]
        draw_front(points, headings, path=self.out / "front.png")
        runs = {
            method: [
                (load(self._folder(method, seed)), run["seconds"] / max(run["step"], 1))
                for seed, run in enumerate(each)
            ]
            for method, each in results.items()
        }
        draw_over_time(runs, axes, headings, path=self.out / "over-time.png")

    def _folder(self, method: str, seed: int) -> pathlib.Path:
        return self.out / f"{method}-seed{seed}"

    @property
    def _title(self) -> str:
        plural = "s" if self.seeds > 1 else ""
        recipe = self.recipe
        return f"{recipe.name}, size {recipe.size}, {self.seeds} seed{plural}, mean ± std"

    def _record(
        self, results: Results, shares: Mapping[str, Share], tried: Sequence[Tried]
    ) -> dict[str, Any]:
        equal = {method: dataclasses.asdict(share) for method, share in shares.items()}
        return {
            "recipe": self.recipe.name,
            "size": self.recipe.size,
            "seeds": self.seeds,
            "machine": describe_machine(),
            "paper": {name: dict(row) for name, row in self.recipe.published.items()},
            **({"equal_time": equal} if equal else {}),
            **({"rule": self.choose, "tried": [one.record() for one in tried]} if tried else {}),
            "results": results,
        }


def describe_machine() -> str:
    """What the figures were measured on."""
    devices = jax.devices()
    what = f"{len(devices)} × {devices[0].device_kind}"
    if devices[0].platform == "cpu":
        what = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    return f"Measured on {what}, jax {jax.__version__}."
