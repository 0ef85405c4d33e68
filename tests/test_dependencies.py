"""Every package that is imported is declared in pyproject.toml, where it can be relied on."""

from __future__ import annotations

import ast
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LIBRARY = ("constrainx", "models", "trainers", "recipes")
WORKSHOP = ("tests", "benchmarks", "docs")
OURS = {"constrainx", *LIBRARY, *WORKSHOP}
# Where the name to import is not the name to install.
DISTRIBUTIONS = {"PIL": "pillow", "absl": "absl-py", "orbax": "orbax-checkpoint"}
DISTRIBUTIONS |= {"griffe": "griffelib", "sklearn": "scikit-learn", "yaml": "pyyaml"}


class Found(NamedTuple):
    """One import of a package that is neither ours nor Python's.

    Attributes:
        distribution: its name on PyPI.
        extra: that of `constrainx[extra]` in the error that its absence is turned into, or None.
        where: file and line.
    """

    distribution: str
    extra: str | None
    where: str


def test_the_library_imports_what_it_declares():
    required, extras = read_declared()
    for found in find_imports(LIBRARY):
        if found.extra is None:
            assert found.distribution in required, (
                f"{found.where} imports {found.distribution}, which `dependencies` does not name. "
                "Add it there, or to an extra, and turn its absence into a MissingPackageError "
                "that names the extra."
            )
        else:
            assert found.distribution in extras[found.extra], (
                f"{found.where} says that constrainx[{found.extra}] brings "
                f"{found.distribution}, and it does not."
            )


def test_the_library_declares_nothing_that_it_does_not_import():
    required, _ = read_declared()
    assert required == {found.distribution for found in find_imports(LIBRARY) if not found.extra}


@pytest.mark.parametrize("folder", WORKSHOP)
def test_tests_benchmarks_and_docs_import_what_their_extras_bring(folder):
    required, extras = read_declared()
    more = {"docs": extras["docs"], "tests": extras["torch"]}
    allowed = required | extras["dev"] | more.get(folder, set())
    for found in find_imports([folder]):
        assert found.distribution in allowed, found


@pytest.mark.parametrize(
    ("source", "distribution", "extra"),
    [
        ("import scipy.linalg", "scipy", None),
        ("def f():\n    from sklearn import svm", "scikit-learn", None),
        (
            "def f():\n    try:\n        import wandb\n    except ImportError as error:\n"
            "        raise MissingPackageError(\"pip install 'constrainx[wandb]'\") from error",
            "wandb",
            "wandb",
        ),
        ("try:\n    import wandb\nexcept ImportError:\n    wandb = None", "wandb", None),
    ],
)
def test_imports_are_found_with_their_extras(tmp_path, source, distribution, extra):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "file.py").write_text(source)
    (found,) = find_imports(["library"], root=tmp_path)
    assert (found.distribution, found.extra) == (distribution, extra)


def read_declared() -> tuple[set[str], dict[str, set[str]]]:
    """The distributions that `dependencies` names, and those that each extra brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def expand(requirement: str) -> set[str]:
        name, _, inner = re.match(r"([\w.-]+)(\[([\w,]+)\])?", requirement).groups()
        if name != project["name"]:
            return {normalise(name)}
        return {one for extra in inner.split(",") for each in extras[extra] for one in expand(each)}

    return (
        {normalise(re.match(r"[\w.-]+", one)[0]) for one in project["dependencies"]},
        {extra: set().union(*map(expand, brought)) for extra, brought in extras.items()},
    )


def find_imports(folders: Iterable[str], *, root: pathlib.Path = ROOT) -> Iterator[Found]:
    """The imports of other people's packages in the Python files of some folders."""
    for path in (path for folder in folders for path in sorted((root / folder).rglob("*.py"))):
        tree = ast.parse(path.read_text())
        extras = {
            id(node): extra
            for attempt in ast.walk(tree)
            if isinstance(attempt, ast.Try)
            for node in attempt.body
            if (extra := read_extra(attempt))
        }
        for node in ast.walk(tree):
            for package in sorted(read_packages(node) - OURS - sys.stdlib_module_names):
                where = f"{path.relative_to(root)}:{node.lineno}"
                distribution = DISTRIBUTIONS.get(package, normalise(package))
                yield Found(distribution, extras.get(id(node)), where)


def read_packages(node: ast.AST) -> set[str]:
    """The top-level packages that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and not node.level:
        return {str(node.module).split(".")[0]}
    return set()


def read_extra(attempt: ast.Try) -> str | None:
    """The extra that a `MissingPackageError` in an ``except`` clause tells people to install."""
    for node in (node for handler in attempt.handlers for node in ast.walk(handler)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "MissingPackageError":
            named = re.search(r"constrainx\[(\w+)\]", ast.unparse(node))
            return named and named[1]
    return None


def normalise(name: str) -> str:
    """As PyPI compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()
