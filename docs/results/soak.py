"""Runs `constrainx soak` for every recipe, and puts the table of docs/training.md beside this file.

``make soak`` runs all of them, ``python docs/results/soak.py o3-inertia`` runs one anew and keeps
the lines of the others.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from constrainx.errors import check_choice

HERE = pathlib.Path(__file__).parent
RUNS = pathlib.Path("runs/soak")
# At size smoke, and long enough to be killed many times.
COMMANDS = {
    "c4-fmnist": ["--epochs", "10"],
    "conservative-score": ["--steps", "40"],
    "continual-fmnist": ["--epochs", "3"],
    "feasible-qp": ["--steps", "40"],
    "gp-calibration": ["--steps", "40"],
    "invariant-digits": ["--epochs", "8"],
    "l0-cifar10": ["--epochs", "4"],
    "l0-imagenet": ["--steps", "40"],
    "l0-svhn": ["--epochs", "4"],
    "o3-inertia": ["--epochs", "5"],
    "periodic-regression": ["--steps", "40"],
    "pinn": ["--steps", "40"],
    "robust-digits": ["--epochs", "8"],
}
HEADINGS = ("recipe", "resumed on", "kills", "in saves", "lost", "difference", "undisturbed")


def main() -> None:
    """Kills and resumes the recipes that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="RECIPE")
    parser.add_argument("--kills", default="20", help="of each run (default: %(default)s)")
    options = parser.parse_args()
    for name in options.names:
        check_choice("name", name, COMMANDS)
    kept = HERE / "soak.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    for name in options.names or COMMANDS:
        arguments = [name, "--size", "smoke", *COMMANDS[name], "--kills", options.kills]
        arguments += ["--out", str(RUNS)]
        subprocess.run([sys.executable, "-m", "constrainx", "soak", *arguments], check=True)
        found[name] = json.loads((RUNS / name / "soak.json").read_text())
        # After each recipe, because all of them take an hour.
        kept.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        (HERE / "soak.md").write_text(as_table(found))


def as_table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A Markdown table with a line for each recipe and layout.

    >>> one = {"layout": "same device", "kills": 10, "in_saves": 2, "lost": 0}
    >>> print(as_table({"mine": [{**one, "difference": 0.0, "undisturbed": 0.0}]}))
    | recipe | resumed on | kills | in saves | lost | difference | undisturbed |
    | --- | --- | ---: | ---: | ---: | ---: | ---: |
    | mine | same device | 10 | 2 | 0 | 0 | 0 |
    <BLANKLINE>
    """
    rows = [HEADINGS, ("---", "---", *["---:"] * (len(HEADINGS) - 2))]
    rows += [
        (
            name,
            one["layout"],
            *(f"{one[column]}" for column in ("kills", "in_saves", "lost")),
            *(f"{one[column]:.2g}" for column in ("difference", "undisturbed")),
        )
        for name in sorted(found)
        for one in found[name]
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    main()
