"""`constrainx data`."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Literal

import tyro

from constrainx.cli._command import PlainCommand
from constrainx.cli._console import print_line, print_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(PlainCommand):
    """List the data sets that are prepared, or prepare one.

    Attributes:
        action: whether to "list" the data sets that are prepared, or to "prepare" one.
        name: the name of a TFDS data set to prepare, such as fashion_mnist.
        data_dir: folder of the data sets; TFDS_DATA_DIR or ~/tensorflow_datasets if left out.
    """

    action: tyro.conf.Positional[Literal["list", "prepare"]]
    name: tyro.conf.Positional[str | None] = None
    data_dir: pathlib.Path | None = None

    def execute(self) -> None:
        """Lists or prepares."""
        if self.action == "list":
            self._list()
        else:
            self._prepare()

    def _prepare(self) -> None:
        from constrainx import data

        if self.name is None:
            raise data.PreparationError("name the data set: constrainx data prepare fashion_mnist.")
        data.prepare(self.name, self.data_dir)
        print_line(f"{self.name} is ready.")

    def _list(self) -> None:
        from constrainx import data

        rows = [
            (
                found.name,
                ", ".join(f"{split} {count}" for split, count in found.splits.items()),
                f"{found.bytes / 1e6:.0f}",
                str(found.path),
            )
            for found in data.list_prepared(self.data_dir)
        ]
        if rows:
            print_table(rows, headings=("data set", "splits", "MB", "folder"))
        else:
            print_line("No data sets yet: constrainx data prepare NAME.")
