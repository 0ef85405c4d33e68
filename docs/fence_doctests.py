"""Shows the examples in docstrings as code; Markdown takes `>>>` for a quotation in a quotation."""

from __future__ import annotations

import itertools
from typing import Any

import griffe


class FenceDoctests(griffe.Extension):
    """Puts a fence around each example, before mkdocstrings reads the docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: ARG002
        """Changes the docstring of an object that has one."""
        if obj.docstring is not None:
            obj.docstring.value = fence(obj.docstring.value)


def fence(text: str) -> str:
    """The text, with a fence around each paragraph that starts with `>>>`."""
    lines = []
    for is_blank, group in itertools.groupby(text.split("\n"), key=lambda line: not line.strip()):
        paragraph = list(group)
        if not is_blank and paragraph[0].lstrip().startswith(">>>"):
            margin = paragraph[0][: len(paragraph[0]) - len(paragraph[0].lstrip())]
            paragraph = [f"{margin}```pycon", *paragraph, f"{margin}```"]
        lines += paragraph
    return "\n".join(lines)
