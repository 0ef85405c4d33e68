"""`constrainx info`."""

from __future__ import annotations

import dataclasses
import platform
from importlib import metadata

from constrainx.cli._command import PlainCommand
from constrainx.cli._console import print_table

PACKAGES = ("constrainx", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Info(PlainCommand):
    """Show versions and devices, for bug reports."""

    def execute(self) -> None:
        """Prints them."""
        import jax

        print_table(
            [
                ("python", platform.python_version()),
                *((name, metadata.version(name)) for name in PACKAGES),
                ("devices", ", ".join(str(device) for device in jax.devices())),
            ]
        )
