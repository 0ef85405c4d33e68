"""Runs the comparisons in docs/recipes, and puts their tables and pictures beside this file.

``make results`` runs all of them, ``python docs/results/make.py o3-inertia`` runs one, and
``python docs/results/make.py o3-inertia-equal-time`` one in which every method has the same time.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

from constrainx.errors import check_choice
from constrainx.report import write

HERE = pathlib.Path(__file__).parent
RUNS = pathlib.Path("runs/results")
# Where the picture is in the comparison's folder. Curves show the first seed alone.
CURVES = "seed0/violation.png"
COMMANDS = {
    "o3-inertia": (["o3-inertia", "--seeds", "3"], CURVES),
    **{
        f"conservative-score-{name}": (
            ["conservative-score", "--dataset", name],
            "nullspace-seed0/picture.png",
        )
        for name in ("8gaussian", "spirals", "checkerboard")
    },
    "c4-fmnist": (
        ["c4-fmnist", "--methods", "kernels", "annealed", "plain", "penalty", "augmentation"],
        "kernels-seed0/picture.png",
    ),
    "l0-cifar10": (
        ["l0-cifar10", "--seeds", "3", "--methods", "learned", "gradual", "one-shot"],
        "seed0/metrics.png",
    ),
    "continual-fmnist": (["continual-fmnist", "--seeds", "5"], "front.png"),
    "feasible-qp": (["feasible-qp"], "feasible-seed0/picture.png"),
    "feasible-qp-sine": (["feasible-qp", "--objective", "sine"], "feasible-seed0/picture.png"),
    "gp-calibration": (["gp-calibration", "--seeds", "10"], "predictive-seed0/picture.png"),
    "periodic-regression": (["periodic-regression", "--seeds", "3"], "nullspace-seed0/picture.png"),
    "invariant-digits": (["invariant-digits", "--seeds", "3"], CURVES),
    "robust-digits": (["robust-digits", "--seeds", "3"], CURVES),
}
# The same at equal time: --equal-time gives every method as long as the first one takes. These take
# hours, so they run only if they are named.
EQUAL_TIME = {
    f"{name}-equal-time": ([*words, "--equal-time", "--sweep", "5", "--seeds", "5"], "front.png")
    for name, words in {
        "o3-inertia": [
            "o3-inertia",
            "--methods",
            "nullspace",
            "augmentation",
            "penalty",
            "lagrangian",
            "plain",
        ],
        **{
            f"conservative-score-{data}": ["conservative-score", "--dataset", data]
            for data in ("8gaussian", "spirals", "checkerboard")
        },
        "c4-fmnist": [
            "c4-fmnist",
            "--methods",
            "kernels",
            "rows",
            "penalty",
            "augmentation",
            "plain",
        ],
        "l0-cifar10": ["l0-cifar10", "--methods", "learned", "gradual", "one-shot"],
        "feasible-qp": ["feasible-qp"],
        "gp-calibration": ["gp-calibration"],
        "periodic-regression": ["periodic-regression"],
        "invariant-digits": ["invariant-digits"],
        "robust-digits": ["robust-digits"],
    }.items()
}


def main(names: list[str]) -> None:
    """Runs the comparisons that are named, or all that take an hour together."""
    known = {**COMMANDS, **EQUAL_TIME}
    for name in names:
        check_choice("name", name, known)
    for name in names or COMMANDS:
        arguments, picture = known[name]
        out = RUNS / name
        command = ["constrainx", "compare", *arguments, "--size", "cpu", "--out", str(out)]
        subprocess.run([sys.executable, "-m", *command], check=True)
        write(sorted(out.glob("*-seed0")), out=out / "seed0")
        for suffix in ("md", "json"):
            shutil.copyfile(out / f"compare.{suffix}", HERE / f"{name}.{suffix}")
        shutil.copyfile(out / picture, HERE / f"{name}.png")
        if name in EQUAL_TIME and (out / "over-time.png").exists():
            shutil.copyfile(out / "over-time.png", HERE / f"{name}-over-time.png")


if __name__ == "__main__":
    main(sys.argv[1:])
