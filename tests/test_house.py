"""The house rules that a linter cannot see, and that the package is what it says it is."""

import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

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


def test_python_dash_m():
    run = subprocess.run(
        [sys.executable, "-m", "constrainx", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "quickstart" in run.stdout
