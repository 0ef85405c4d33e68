"""`constrainx` on the command line."""

from __future__ import annotations

import pathlib
import platform
import sys
from importlib import metadata

import tyro
from rich.console import Console
from rich.table import Table

app = tyro.extras.SubcommandApp()


def main() -> None:
    """Runs the command that the arguments name."""
    app.cli(
        prog="constrainx",
        description="Train neural networks that must obey constraints.",
        args=sys.argv[1:] or ["--help"],
    )


@app.command
def quickstart(epochs: int = 100, out: pathlib.Path = pathlib.Path("results/quickstart")) -> None:
    """Trains a network on the moment of inertia, with and without the O(3) constraint.

    Args:
        epochs: passes over the training data; 100 took 3:11 on two busy cores.
        out: where the plot and the figures go.
    """
    from constrainx.quickstart import run

    run(epochs=epochs, out=out)


@app.command
def info() -> None:
    """Shows versions and devices, for bug reports."""
    import jax

    table = Table(show_header=False, box=None)
    table.add_row("python", platform.python_version())
    for name in ("constrainx", "jax", "jaxlib", "flax", "optax"):
        table.add_row(name, metadata.version(name))
    table.add_row("devices", ", ".join(str(device) for device in jax.devices()))
    Console().print(table)
