"""Plain tables that fit a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 80


def lay_out(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    r"""Lines with the first column to the left and the others to the right.

    Names in the first column are shortened in their middle if the table would be too wide.

    >>> print(*lay_out(["name", "rows"], [["a" * 90, "1"]]), sep="\n")
    name                                                                        rows
    aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa     1
    """
    cells = [[_clean(cell) for cell in row] for row in [headings, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    room = max(WIDTH - sum(width + 2 for width in widths[1:]), 8)
    widths[0] = min(widths[0], room)
    return [
        "  ".join(
            [
                shorten(row[0], widths[0]).ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in cells
    ]


def wrap(sentence: str) -> list[str]:
    """A sentence as the item of a list."""
    return textwrap.wrap(_clean(sentence), WIDTH, initial_indent="- ", subsequent_indent="  ")


def shorten(text: str, width: int) -> str:
    """The text, without its middle if it is too long."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return text[:head] + "…" + text[len(text) - (width - 1 - head) :]


def figure(value: float | None) -> str:
    """A number in three digits, as short as possible; a dash for none."""
    return "–" if value is None else f"{value:.3g}"


def percent(share: float) -> str:
    """A share between 0 and 1 in per cent."""
    return f"{100 * share:.3g} %"


def _clean(text: str) -> str:
    """One line, whatever characters a name has."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
