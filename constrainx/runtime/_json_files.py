"""Small JSON files of a run, written whole or not at all, and checked when they are read."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any


def write_object(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes a file whole or not at all, whatever happens meanwhile.

    Raises:
        OSError: it could not be written. The file is as it was before.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            # Or a power cut could leave the new name with nothing in it.
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: what is in it is not a JSON object; the message says what it is.
    """
    content = path.read_bytes()
    if not content.strip(b"\0 \t\r\n"):
        raise ValueError("it is empty" if not content else "there is nothing but zeros in it")
    try:
        found = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not text in UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError(f"it must be a JSON object, got {json.dumps(found)[:80]}")
    return found
