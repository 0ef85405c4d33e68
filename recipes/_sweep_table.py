"""What a sweep tried, as a table with the whole front."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from constrainx.recipes._sweep import describe_values, find_front, read_axes
from constrainx.recipes._tables import Grid


@dataclasses.dataclass(frozen=True)
class Tried:
    """One run of a sweep.

    Attributes:
        method: of the recipe.
        values: of the fields that were swept.
        run: its result.
        is_best: whether these are the values that the reported runs have.
    """

    method: str
    values: Mapping[str, Any]
    run: Mapping[str, Any]
    is_best: bool

    def serves(self, method: str) -> bool:
        """Whether the reported runs of a method have these values."""
        return self.is_best and self.method == method

    def record(self) -> dict[str, Any]:
        """For compare.json."""
        kept = {name: self.run[name] for name in ("metrics", "seconds", "step")}
        return {"method": self.method, "values": dict(self.values), "best": self.is_best, **kept}


def tabulate_tried(
    tried: Sequence[Tried], axes: Sequence[str], headings: Mapping[str, str]
) -> Grid:
    """All values that were tried, which were chosen, and which no other run beats in all figures.

    Args:
        tried: all runs of all sweeps.
        axes: which metrics.
        headings: their names.
    """
    points = [read_axes(one.run, axes) for one in tried]
    rows = [
        [
            one.method,
            describe_values(one.values),
            *(f"{figure:.3g}" if figure < float("inf") else "–" for figure in point),
            "yes" if on_front else "",
            "yes" if one.is_best else "",
        ]
        for one, point, on_front in zip(tried, points, find_front(points), strict=True)
    ]
    names = [headings.get(axis, axis) for axis in axes]
    return Grid("Values tried", ["method", "values", *names, "front", "chosen"], rows)
