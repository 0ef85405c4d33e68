"""Sweeps: which values of a method's fields to try, and which of them was best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from constrainx.errors import UserError, did_you_mean
from constrainx.recipes._recipe import Recipe

Rule: TypeAlias = Literal["error", "violation", "product"]
RULES: Mapping[Rule, str] = {
    "error": "smallest error",
    "violation": "smallest violation",
    "product": "smallest error × violation",
}
# No comparison reports the figures of this seed.
SWEEP_SEED = 1000


class SweepError(UserError, ValueError):
    """A sweep cannot be made like this."""


def check_sweeps(recipe: Recipe, methods: Sequence[str]) -> None:
    """Raises if a recipe's sweeps name what it does not have, or what was given by hand."""
    known, owner = recipe.field_names(), f"`sweeps` of {type(recipe).__name__}"
    for method, fields in recipe.sweeps.items():
        if method not in recipe.methods:
            raise SweepError(
                f"{owner} names the method {method!r}, which it does not have."
                f"{did_you_mean(method, recipe.methods)}"
            )
        for name, (low, high) in fields.items():
            if name not in known:
                raise SweepError(
                    f"{owner} names {name!r}, which is no field of it.{did_you_mean(name, known)}"
                )
            if not 0 < low <= high < math.inf:
                raise SweepError(
                    f"{owner} must have a range of positive numbers, the smaller one first, for "
                    f"{name!r}, got {(low, high)!r}: values are tried at equal factors."
                )
            if method in methods and recipe.was_given(name):
                raise SweepError(
                    f"`{name}` was given by hand, so it cannot be swept for {method!r}. Leave out "
                    f"`--{name.replace('_', '-')}`, or `--sweep`."
                )
    for name in recipe.validation:
        if name not in known:
            raise SweepError(
                f"`validation` of {type(recipe).__name__} names {name!r}, which is no field of it."
                f"{did_you_mean(name, known)}"
            )


def spread(ranges: Mapping[str, tuple[float, float]], count: int) -> list[dict[str, float]]:
    """Values to try: at equal factors for one field; spread over the box for several.

    >>> spread({"weight": (0.1, 10.0)}, 3)
    [{'weight': 0.1}, {'weight': 1.0}, {'weight': 10.0}]

    Several fields get the points of a sequence of low discrepancy, by powers of the root of
    xᵈ⁺¹ = x + 1 (Roberts, 2018), on a logarithmic scale. Values have three digits.
    """
    if len(ranges) == 1:
        shares = [[i / (count - 1)] if count > 1 else [0.5] for i in range(count)]
    else:
        root = 2.0
        for _ in range(40):
            root = (1 + root) ** (1 / (len(ranges) + 1))
        powers = [root ** -(j + 1) for j in range(len(ranges))]
        shares = [[(0.5 + i * power) % 1 for power in powers] for i in range(count)]
    return [
        {
            name: float(f"{low * (high / low) ** share:.3g}")
            for (name, (low, high)), share in zip(ranges.items(), point, strict=True)
        }
        for point in shares
    ]


def choose(found: Sequence[Mapping[str, Any]], axes: Sequence[str], rule: Rule) -> int:
    """The position of the best of several runs; ties are for the smaller violation, then error.

    Figures that are missing or not finite are worse than all others.

    Args:
        found: runs, with their ``metrics``.
        axes: the metric that is called error and, if there is one, that called violation.
        rule: what is smallest for the best.
    """
    if rule != "error" and len(axes) < 2:
        raise SweepError(
            f"the rule {rule!r} needs a violation, and `axes` of the recipe has none. Use the rule "
            "'error'."
        )

    def rank(run: Mapping[str, Any]) -> tuple[float, ...]:
        error, *rest = read_axes(run, axes)
        violation = rest[0] if rest else 0.0
        first = {"error": error, "violation": violation, "product": error * violation}[rule]
        return (first if math.isfinite(first) else math.inf, violation, error)

    ranks = [rank(run) for run in found]
    return min(range(len(ranks)), key=lambda index: ranks[index])


def find_front(points: Sequence[Sequence[float]]) -> list[bool]:
    """For each point, whether no other is at least as good in everything and better in something.

    >>> find_front([(1, 3), (2, 2), (3, 1), (3, 3)])
    [True, True, True, False]
    """

    def beats(a: Sequence[float], b: Sequence[float]) -> bool:
        return all(x <= y for x, y in zip(a, b, strict=True)) and tuple(a) != tuple(b)

    finite = [all(map(math.isfinite, point)) for point in points]
    return [
        good and not any(other and beats(rival, point) for rival, other in both)
        for both in [list(zip(points, finite, strict=True))]
        for point, good in both
    ]


def read_axes(run: Mapping[str, Any], axes: Sequence[str]) -> list[float]:
    """The figures of a run on the axes; infinite where it has none."""
    figures = [run["metrics"].get(name, math.inf) for name in axes]
    return [math.inf if figure is None or math.isnan(figure) else figure for figure in figures]


def describe_values(values: Mapping[str, Any]) -> str:
    """Values in words, which also name a folder."""
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def as_fields(recipe: Recipe, values: Mapping[str, float]) -> dict[str, Any]:
    """The values, as whole numbers where the recipe has these."""
    return {
        name: max(1, round(value)) if isinstance(getattr(recipe, name), int) else value
        for name, value in values.items()
    }
