"""`constrainx data`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Literal

import tyro

from constrainx.cli._command import PlainCommand
from constrainx.cli._console import print_line, print_table
from constrainx.cli._data_bench import BenchData
from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(PlainCommand):
    """List the data sets that are prepared, prepare one, or measure how fast a recipe's data come.

    Attributes:
        action: whether to "list" the data sets that are prepared, to "prepare" one, or to "bench"
            the training data of a recipe, see `constrainx data bench --help`.
        name: the name of a TFDS data set to prepare, such as fashion_mnist, or of a recipe.
        data_dir: folder of the data sets; TFDS_DATA_DIR or ~/tensorflow_datasets if left out.
    """

    action: tyro.conf.Positional[Literal["list", "prepare", "bench"]]
    name: tyro.conf.Positional[str | None] = None
    data_dir: pathlib.Path | None = None

    @classmethod
    def start(cls, arguments: Sequence[str], *, name: str) -> None:
        """The options of "bench" depend on the recipe, so it is a command of its own."""
        if arguments and arguments[0] == "bench":
            BenchData.start(arguments[1:], name=f"{name} bench")
        else:
            super().start(arguments, name=name)

    @classmethod
    def list_flags(cls) -> list[str]:
        """With those of "bench"."""
        return [*super().list_flags(), *BenchData.list_flags()]

    def execute(self) -> None:
        """Lists or prepares."""
        if self.action == "bench":
            raise ArgumentError("write `bench` first: constrainx data bench RECIPE.")
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
