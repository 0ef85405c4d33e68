"""Differences between methods, seed by seed: the same data and start for both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from constrainx.recipes._sweep import read_axes
from constrainx.recipes._tables import Grid, Results


def tabulate_pairs(
    results: Results, axes: Sequence[str], headings: Mapping[str, str]
) -> Grid | None:
    """Each method minus the first one, and for how many seeds its figure is the smaller one.

    The error is the standard error of the mean difference, which the spread between seeds that
    both methods share does not enter.

    Args:
        results: at least two seeds of each method; None is returned for fewer.
        axes: which metrics.
        headings: their names.
    """
    first, *others = results
    seeds = len(results[first])
    if seeds < 2 or not others:
        return None
    reference = [read_axes(run, axes) for run in results[first]]
    rows = []
    for method in others:
        found = [read_axes(run, axes) for run in results[method]]
        cells = [
            cell
            for axis in range(len(axes))
            for cell in describe_pairs(
                [run[axis] for run in found], [run[axis] for run in reference]
            )
        ]
        rows.append([method, *cells])
    names = [name for axis in axes for name in (f"Δ {headings.get(axis, axis)}", "wins")]
    title = f"Minus {first}, over {seeds} paired seeds: mean ± standard error, and wins"
    return Grid(title, ["method", *names], rows)


def describe_pairs(found: Sequence[float], reference: Sequence[float]) -> tuple[str, str]:
    """The mean difference with its standard error, and how often the first one is smaller.

    >>> describe_pairs([1.0, 2.0, 4.0], [2.0, 3.0, 3.0])
    ('-0.333 ± 0.67', '2 of 3')
    """
    pairs = list(zip(found, reference, strict=True))
    wins = sum(a < b for a, b in pairs)
    differences = [a - b for a, b in pairs]
    if not all(map(math.isfinite, differences)):
        return "–", f"{wins} of {len(pairs)}"
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{statistics.mean(differences):.3g} ± {error:.2g}", f"{wins} of {len(pairs)}"
