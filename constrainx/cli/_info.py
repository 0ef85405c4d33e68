"""`constrainx info`."""

from __future__ import annotations

import dataclasses

from constrainx.cli._command import PlainCommand
from constrainx.cli._console import print_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Info(PlainCommand):
    """Show versions and devices, for bug reports."""

    def execute(self) -> None:
        """Prints them."""
        from constrainx.runtime import describe_environment

        found = describe_environment()
        devices = ", ".join(found.pop("devices"))
        print_table([(name, str(value)) for name, value in {**found, "devices": devices}.items()])
