"""Help and completion: they know every command, and do not wait for JAX."""

import pathlib
import subprocess
import sys

import pytest

import constrainx as package
from constrainx.cli._command import Command
from constrainx.cli._main import COMMANDS, load_command

# The package itself imports JAX, which the command line cannot help; so it is left out here.
WITHOUT_PACKAGE = """
import sys, types
package = types.ModuleType("constrainx")
package.__path__ = [FOLDER]
sys.modules["constrainx"] = package
from constrainx.cli import main
sys.argv = ["constrainx", *ARGUMENTS]
try:
    main()
except SystemExit as stop:
    assert not stop.code
assert "jax" not in sys.modules
assert "numpy" not in sys.modules
"""


def test_help_shows_every_field(constrainx):
    code, text = constrainx("train", "o3-inertia", "--help")
    assert code == 0
    for word in ("--gamma", "--save-every", "--keep.last", "--distributed", "penalty-strong"):
        assert word in text
    code, text = constrainx("--help")
    assert code == 0
    for command in COMMANDS:
        assert command in text


def test_completion_knows_commands_recipes_and_fields(constrainx, tmp_path):
    _, script = constrainx("completion", "bash")
    (tmp_path / "completion.sh").write_text(script)

    def complete(*words):
        text = " ".join(f"'{word}'" for word in ("constrainx", *words))
        command = (
            f"source completion.sh; COMP_WORDS=({text}); COMP_CWORD={len(words)}; _constrainx;"
            ' echo "${COMPREPLY[@]}"'
        )
        return subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path
        ).stdout.split()

    assert complete("rep") == ["report"]
    assert complete("train", "o3") == ["o3-inertia"]
    assert complete("train", "o3-inertia", "--gam") == ["--gamma"]
    assert complete("train", "o3-inertia", "--distr") == ["--distributed"]
    assert complete("resume", "runs/mine", "--keep") == [
        "--keep.last",
        "--keep.best",
        "--keep.every",
    ]
    assert complete("resume", "runs/mine", "--wan") == ["--wandb"]
    assert complete("launch", "k") == ["kubernetes"]
    assert complete("launch", "slurm", "o3") == ["o3-inertia"]
    assert complete("launch", "slurm", "o3-inertia", "--part") == ["--partition"]
    assert complete("launch", "slurm", "o3-inertia", "--gam") == ["--gamma"]
    assert complete("resume", "runs/mine", "--gam") == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_text(constrainx, name):
    assert issubclass(load_command(name), Command)
    code, text = constrainx(name, "--help")
    assert code == 0
    assert f"usage: constrainx {name}" in text


@pytest.mark.parametrize("arguments", [["--help"], [], ["train", "--help"]])
def test_help_does_not_wait_for_jax(arguments):
    folder = str(pathlib.Path(package.__file__).parent)
    script = WITHOUT_PACKAGE.replace("FOLDER", repr(folder)).replace("ARGUMENTS", repr(arguments))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "usage: constrainx" in ended.stdout
