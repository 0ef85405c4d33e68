"""Which number of rows and which γ do best on `o3-inertia`, and how long they take."""

from __future__ import annotations

import itertools
from typing import Any

from matplotlib.figure import Figure

from benchmarks.report import Goal, Report, Table
from constrainx.recipes.o3_inertia import O3Inertia

BASELINES: dict[str, dict[str, Any]] = {
    "augmentation": {"method": "augmentation"},
    **{f"penalty {w}": {"method": "penalty", "weight": w} for w in (0.384, 1.28, 3.84, 12.8)},
    **{
        f"Lagrangian {w}": {"method": "lagrangian", "weight": w}
        for w in (0.000384, 0.00128, 0.00384)
    },
    "paper, 9 means": {"method": "paper"},
}


def run(*, quick: bool) -> Report:
    """Trains each setting once, for fewer epochs than the recipe has."""
    size, epochs = ("smoke", 1) if quick else ("cpu", 30)
    rows = (4, 8) if quick else (16, 64, 128)
    settings = dict(BASELINES)
    for count, gamma in itertools.product(rows, (3.0, 10.0, 30.0)):
        settings[f"{count} rows, γ {gamma:g}"] = {
            "method": "nullspace", "rows": count, "gamma": gamma,
        }  # fmt: skip
    settings[f"{rows[-1]} rows, γ 10, of the batch"] = {
        "method": "nullspace", "rows": rows[-1], "fresh": False,
    }  # fmt: skip
    results = {}
    for name, fields in settings.items():
        trainer = O3Inertia(size=size, epochs=epochs, **fields).trainer(devices=1, progress=False)
        result = trainer.fit()
        results[name] = (
            result.metrics["error"],
            result.metrics["violation/O(3)"],
            result.seconds,
        )
    base = results["augmentation"]
    best = min(
        (name for name in results if "rows" in name and results[name][0] <= base[0]),
        key=lambda name: results[name][1],
        default=None,
    )
    share = results[best][1] / base[1] if best else float("nan")
    better = [
        name
        for name in BASELINES
        if best and all(a < b for a, b in zip(results[name][:2], results[best][:2], strict=True))
    ]
    return Report(
        name="sweep",
        setting=f"o3-inertia, size {size}, {epochs} epochs, seed 0, one run each.",
        tables=[
            Table(
                "Test error, violation, and seconds in steps",
                {"setting": "", "error": ".4f", "violation": ".4f", "s": ".1f"},
                [(name, *figures) for name, figures in results.items()],
            )
        ],
        goals=[
            Goal(
                "no more error than augmentation at half its violation",
                f"{best}: {share:.2f} of the violation",
                share <= 0.5,
            ),
            Goal(
                "no other method is better in both at equal time",
                ", ".join(better) or "none",
                best is not None and not better,
            ),
        ],
        plots={"sweep": _draw_picture(results)},
    )


def _draw_picture(results: dict[str, tuple[float, float, float]]) -> Figure:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, (error, violation, _) in results.items():
        marker = "o" if "rows" in name else "x"
        axes.plot(violation, error, marker, color="#0072B2" if marker == "o" else "#D55E00")
        axes.annotate(
            name, (violation, error), fontsize=7, xytext=(4, 2), textcoords="offset points"
        )
    axes.set(xscale="log", yscale="log", xlabel="violation", ylabel="test error")
    return figure
