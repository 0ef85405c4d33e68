"""Speed of one solve without gradients, on two extremes: all vector work, and hardly any."""

from __future__ import annotations

from benchmarks import one_row, overhead
from benchmarks.report import Report


def run(*, quick: bool) -> Report:
    """Times a solve against peers, and an iteration against the products with A in it."""
    if quick:
        parts = [one_row.measure((20, 25), rounds=2), overhead.measure(200, 16, rounds=2)]
    else:
        parts = [one_row.measure((2000, 2500), rounds=7), overhead.measure(4000, 512, rounds=15)]
    tables, goals = zip(*parts, strict=True)
    return Report(
        name="solve",
        setting=f"Float32. {one_row.SETTING} {overhead.SETTING}",
        tables=tables,
        goals=[] if quick else goals,
    )
