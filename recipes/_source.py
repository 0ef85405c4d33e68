"""Which code a recipe runs: its file, the files next to it that it imports, and constrainx."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator

from constrainx import errors


@functools.cache
def digest_source(recipe: type) -> dict[str, str]:
    """Digests of a recipe's source and of that of constrainx, to tell whether either has changed.

    Those of the recipe cover the modules and packages next to its file that it imports, directly or
    not. Data files do not count.

    Args:
        recipe: a class, whose file is read the first time that it is asked for.
    """
    return {"recipe": _digest_recipe(recipe), "constrainx": _digest_constrainx()}


def find_file(recipe: type) -> pathlib.Path | None:
    """The file that a recipe is in; None for one that was written in a notebook."""
    file = getattr(sys.modules.get(recipe.__module__), "__file__", None)
    return pathlib.Path(file).absolute() if file else None


def list_sources(file: pathlib.Path) -> list[pathlib.Path]:
    """A file, and those next to it that it imports, directly or not, without running any."""
    found: dict[pathlib.Path, None] = {}
    waiting = [file]
    while waiting:
        source = waiting.pop()
        if source in found or not source.is_file():
            continue
        found[source] = None
        for name in _list_imports(source):
            waiting.append(file.parent / f"{name}.py")
            waiting += sorted((file.parent / name).rglob("*.py"))
    return sorted(found)


def _digest_recipe(recipe: type) -> str:
    file = find_file(recipe)
    if file is not None and file.is_file():
        return _digest_files(list_sources(file), start=file.parent)
    try:
        return hashlib.sha256(inspect.getsource(recipe).encode()).hexdigest()
    except (OSError, TypeError):  # typed at a prompt
        return "unknown"


@functools.cache
def _digest_constrainx() -> str:
    folder = pathlib.Path(errors.__file__).parent
    files = [
        pathlib.Path(parent) / name
        # Models, trainers and recipes are links in a checkout.
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]
    return _digest_files(sorted(files), start=folder)


def _digest_files(files: Iterable[pathlib.Path], *, start: pathlib.Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{content} {file.relative_to(start).as_posix()}\n".encode())
    return digest.hexdigest()


def _list_imports(file: pathlib.Path) -> Iterator[str]:
    """The first parts of the names of all modules that a file imports, anywhere in it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # a page of documentation, whose code was executed
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]
