"""The house rules that a linter cannot see, and that the package is what it says it is."""

import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

from .import_contract import find_faults

ROOT = pathlib.Path(__file__).parent.parent
PARTS = ("models", "trainers", "recipes")


@pytest.mark.parametrize("name", PARTS)
def test_parts_import_as_parts_of_the_package(name):
    module = __import__(f"constrainx.{name}", fromlist=["_"])
    assert module.__name__ == f"constrainx.{name}"
    assert (ROOT / "constrainx" / name).is_symlink()
    assert pathlib.Path(module.__file__).resolve() == ROOT / name / "__init__.py"


def test_nobody_imports_a_second_copy():
    """`import models` would make a second copy of every class in it."""
    pattern = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(PARTS)})\b", re.MULTILINE)
    for folder in ("constrainx", *PARTS, "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not pattern.search(path.read_text()), path


def test_rooms_keep_the_import_contract():
    faults = find_faults(ROOT / "constrainx")
    assert not faults, "see LAYERS and PUBLIC_FILES in tests/import_contract.py"


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        pytest.param(
            {"linalg/_a.py": "from constrainx.step import walk", "step/__init__.py": ""},
            "upward import: constrainx.linalg._a imports constrainx.step",
            id="upward",
        ),
        pytest.param(
            {"linalg/_a.py": "def f():\n    import constrainx.step", "step/__init__.py": ""},
            "upward import: constrainx.linalg._a imports constrainx.step",
            id="upward, inside a function",
        ),
        pytest.param(
            {"linalg/_a.py": "import constrainx as cx", "__init__.py": ""},
            "upward import: constrainx.linalg._a imports constrainx",
            id="upward, to the root",
        ),
        pytest.param(
            {"step/_a.py": "from constrainx.linalg._b import f", "linalg/_b.py": ""},
            "private import: constrainx.step._a imports constrainx.linalg._b",
            id="private module",
        ),
        pytest.param(
            {"step/_a.py": "from constrainx.linalg import _b", "linalg/_b.py": ""},
            "private import: constrainx.step._a imports constrainx.linalg._b",
            id="private module, from its package",
        ),
        pytest.param(
            {"step/_a.py": "from constrainx.linalg import _helper"},
            "private import: constrainx.step._a imports constrainx.linalg",
            id="private function",
        ),
        pytest.param(
            {
                "constraints/_a.py": "from .groups._b import f",
                "constraints/groups/__init__.py": "",
                "constraints/groups/_b.py": "",
            },
            "private import: constrainx.constraints._a imports constrainx.constraints.groups._b",
            id="private module of a sub-package",
        ),
        pytest.param(
            {
                "linalg/_a.py": "from constrainx.linalg._b import f",
                "linalg/_b.py": "def g():\n    from constrainx.linalg._a import h",
            },
            "import cycle: constrainx.linalg._a, constrainx.linalg._b",
            id="cycle, inside a function",
        ),
        pytest.param(
            {
                "linalg/_a.py": "from constrainx.linalg._b import f",
                "linalg/_b.py": "if TYPE_CHECKING:\n    from constrainx.linalg._a import h",
            },
            "import cycle: constrainx.linalg._a, constrainx.linalg._b",
            id="cycle, for type checkers",
        ),
        pytest.param(
            {
                "linalg/__init__.py": "from constrainx.linalg._a import f",
                "linalg/_a.py": "from constrainx.linalg import g",
            },
            "import cycle: constrainx.linalg, constrainx.linalg._a",
            id="cycle, by way of the face",
        ),
        pytest.param({"linalg/solve.py": ""}, "public file: constrainx.linalg.solve", id="public"),
        pytest.param(
            {"attic/_a.py": ""}, "room without a place in `LAYERS`: attic", id="unordered room"
        ),
        pytest.param(
            {
                "linalg/__init__.py": "from constrainx.linalg._a import qr as qr",
                "linalg/_a.py": "",
                "linalg/qr/__init__.py": "",
            },
            "both a module and an object: constrainx.linalg.qr",
            id="module and imported function",
        ),
        pytest.param(
            {"linalg/__init__.py": "def qr(): ...", "linalg/qr/__init__.py": ""},
            "both a module and an object: constrainx.linalg.qr",
            id="module and defined function",
        ),
    ],
)
def test_the_import_contract_finds_a_fault(tmp_path, files, fault):
    assert find_faults(_write_package(tmp_path, files)) == {fault}


def test_the_import_contract_allows_what_it_should(tmp_path):
    files = {
        "__init__.py": "from constrainx.constraints import groups as groups",
        "errors.py": "",
        "constraints/__init__.py": "from constrainx.constraints import groups as groups",
        "constraints/_a.py": "from constrainx.constraints._b import f\nimport jax._src",
        "constraints/_b.py": "from constrainx.linalg import g",
        "constraints/groups/__init__.py": "from constrainx.constraints.groups._c import C as C",
        "constraints/groups/_c.py": "from constrainx.constraints._b import f",
        "recipes/digits.py": "from constrainx.constraints import groups",
    }
    assert find_faults(_write_package(tmp_path, files)) == set()


def _write_package(folder, files):
    root = folder / "constrainx"
    for name, text in {"linalg/__init__.py": "", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_wheel_installed_elsewhere_is_complete(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "elsewhere"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    assert {path.name for path in target.iterdir() if "dist-info" not in path.name} == {
        "constrainx"
    }
    assert (target / "constrainx" / "py.typed").exists()
    names = ", ".join(f"constrainx.{name}" for name in ("linalg", *PARTS))
    script = f"import {names}; print(constrainx.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=target, check=True, capture_output=True, text=True,
        env={"PYTHONPATH": str(target), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert run.stdout.strip().startswith(str(target))


def test_python_m_constrainx_shows_the_help_text():
    run = subprocess.run(
        [sys.executable, "-m", "constrainx", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "quickstart" in run.stdout
