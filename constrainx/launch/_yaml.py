"""Documents of dicts and lists as YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as lines."""

    def represent_text(self, text: str) -> yaml.Node:
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def write_documents(comment: str, *documents: Mapping[str, Any]) -> str:
    r"""Documents one after the other, below a comment.

    >>> print(write_documents("Two pairs.", {"a": "1"}, {"b": "x\ny\n"}), end="")
    # Two pairs.
    a: '1'
    ---
    b: |
      x
      y

    Args:
        comment: one line.
        documents: of dicts, lists, text, numbers and booleans.
    """
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000)
    return f"# {comment}\n{text}"
