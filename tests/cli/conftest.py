"""The command line in this process, and a finished run."""

import logging
import sys

import pytest

from constrainx import runtime
from constrainx.cli import _run_trainer, main
from constrainx.recipes import write_result
from constrainx.recipes.o3_inertia import O3Inertia


@pytest.fixture
def constrainx(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder; returns its exit code and what it wrote."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_run_trainer, "use_compilation_cache", lambda: None)
    monkeypatch.setattr(runtime, "keep_memory", lambda: None)
    monkeypatch.setenv("COLUMNS", "100")
    # What a program may set for good, a test puts back.
    logger = logging.getLogger("constrainx")
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    monkeypatch.setattr(logger, "handlers", [*logger.handlers])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["constrainx", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        written = capsys.readouterr()
        return code, written.out + written.err

    return run


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished run of the recipe, to look at and to copy."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    recipe = O3Inertia(size="smoke", devices=1, save_every=8, log_every=4)
    write_result(folder, recipe, recipe.trainer(run=folder, progress=False).fit())
    return folder
