"""Reads who imports whom from the source, and lists what breaks the contract between the rooms.

Imports inside functions and under `TYPE_CHECKING` count like any other: they hide a dependency from
the interpreter, not from a reader.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping

# A layer imports only from itself and from those before it.
LAYERS = (
    "errors",
    "linalg",
    "constraints",
    "layers",
    "step",
    "data",
    "runtime",
    "checks",
    "polishing",
    "report",
    "models",
    "trainers",
    "plan",
    "recipes",
    "launch",
    "cli",
)

# Files that users import by name; every other implementation file starts with an underscore.
PUBLIC_FILES = (
    "errors",
    "__main__",
    "trainers.adversarial",
    "trainers.classification",
    "trainers.equations",
    "trainers.score_matching",
    "recipes.*",
)

# A text that `constrainx new` writes: what it imports is up to its readers.
TEMPLATES = ("recipes._starter",)


@dataclasses.dataclass(frozen=True)
class Module:
    """A source file under its import name.

    Attributes:
        name: such as ``"constrainx.linalg._lsmr"``, or ``"constrainx.linalg"`` for a face.
        path: the file.
        is_face: whether it is the ``__init__.py`` of a package.
    """

    name: str
    path: pathlib.Path
    is_face: bool

    @property
    def package(self) -> str:
        """The package that the file lies in."""
        return self.name if self.is_face else self.name.rpartition(".")[0]

    @property
    def inner_name(self) -> str:
        """The name without the root package."""
        return self.name.partition(".")[2]

    @property
    def layer(self) -> int:
        """The position in `LAYERS`; the root comes after all of them, for its face shows them."""
        first = self.inner_name.split(".")[0]
        return LAYERS.index(first) if first in LAYERS else len(LAYERS)


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported name.

    Attributes:
        importer: the module that imports.
        target: the module that is imported.
        attribute: the name taken from it, or None where the module itself is.
        bound: what the importer calls it.
    """

    importer: Module
    target: Module
    attribute: str | None
    bound: str

    def __str__(self) -> str:
        return f"{self.importer.name} imports {self.target.name}"


def find_faults(root: pathlib.Path) -> set[str]:
    """Every breach of the contract in the package at `root`, a sentence each."""
    modules = read_modules(root)
    imports = [
        found
        for module in modules.values()
        if module.inner_name not in TEMPLATES
        for found in _read_imports(module, modules)
    ]
    return {
        *_find_upward_imports(imports),
        *_find_private_imports(imports),
        *_find_cycles(imports),
        *_find_unordered_rooms(modules.values()),
        *_find_public_files(modules.values()),
        *_find_shadowed_modules(imports, modules),
    }


def read_modules(root: pathlib.Path) -> dict[str, Module]:
    """The modules of a package by name, those behind symbolic links included."""
    modules = {}
    for folder, _, files in os.walk(root, followlinks=True):
        for path in (pathlib.Path(folder) / file for file in sorted(files)):
            if path.suffix == ".py":
                parts = (root.name, *path.relative_to(root).with_suffix("").parts)
                is_face = parts[-1] == "__init__"
                name = ".".join(parts[:-1] if is_face else parts)
                modules[name] = Module(name, path, is_face)
    return modules


def _read_imports(module: Module, modules: Mapping[str, Module]) -> Iterator[Import]:
    for node in ast.walk(ast.parse(module.path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    bound = alias.asname or alias.name.split(".")[0]
                    yield Import(module, modules[alias.name], None, bound)
        elif isinstance(node, ast.ImportFrom):
            source = _source_of(node, module)
            for alias in node.names if source in modules else ():
                bound, below = alias.asname or alias.name, f"{source}.{alias.name}"
                if below in modules:  # `from package import module`
                    yield Import(module, modules[below], None, bound)
                else:
                    yield Import(module, modules[source], alias.name, bound)


def _source_of(node: ast.ImportFrom, module: Module) -> str:
    """What follows ``from``, with leading dots replaced by the package that they stand for."""
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    above = parts[: len(parts) - (node.level - 1)]
    return ".".join([*above, *([node.module] if node.module else [])])


def _find_upward_imports(imports: Iterable[Import]) -> Iterator[str]:
    for found in imports:
        if found.target.layer > found.importer.layer:
            yield f"upward import: {found}"


def _find_private_imports(imports: Iterable[Import]) -> Iterator[str]:
    """What is private to a package may be used in it and in its sub-packages, not elsewhere."""
    for found in imports:
        path = [*found.target.name.split("."), *([found.attribute] if found.attribute else [])]
        first = next((index for index, part in enumerate(path) if _is_private(part)), None)
        if first is not None:
            home = ".".join(path[:first])
            if not f"{found.importer.package}.".startswith(f"{home}."):
                yield f"private import: {found}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _find_cycles(imports: Iterable[Import]) -> Iterator[str]:
    edges: dict[str, set[str]] = {}
    for found in imports:
        edges.setdefault(found.importer.name, set()).add(found.target.name)
    reached = {name: _reach(name, edges) for name in edges}
    for name in edges:
        if name in reached[name]:
            # Each member of a cycle finds the same members, and so says the same sentence.
            cycle = sorted(other for other in reached[name] if name in reached.get(other, ()))
            yield f"import cycle: {', '.join(cycle)}"


def _reach(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = edges.get(waiting.pop(), set()) - reached
        reached |= new
        waiting.extend(new)
    return reached


def _find_unordered_rooms(modules: Iterable[Module]) -> Iterator[str]:
    for module in modules:
        room = module.inner_name.split(".")[0]
        if room not in ("", "__main__", *LAYERS):
            yield f"room without a place in `LAYERS`: {room}"


def _find_public_files(modules: Iterable[Module]) -> Iterator[str]:
    for module in modules:
        package, _, file = module.inner_name.rpartition(".")
        is_named = module.inner_name in PUBLIC_FILES or f"{package}.*" in PUBLIC_FILES
        if not (module.is_face or _is_private(file) or is_named):
            yield f"public file: {module.name}"


def _find_shadowed_modules(
    imports: Iterable[Import], modules: Mapping[str, Module]
) -> Iterator[str]:
    """`package.name` must not be a module for one reader and a function for the next."""
    shown = {
        (found.importer.name, found.bound)
        for found in imports
        if found.importer.is_face and found.target.name != f"{found.importer.name}.{found.bound}"
    }
    for module in modules.values():
        if module.is_face:
            for node in ast.parse(module.path.read_text()).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    shown.add((module.name, node.name))
    for package, name in shown:
        if f"{package}.{name}" in modules:
            yield f"both a module and an object: {package}.{name}"
