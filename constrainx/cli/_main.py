"""The program: finds the command that the arguments name, and starts it."""

from __future__ import annotations

import importlib
import inspect
import signal
import sys

from constrainx.cli._command import Command
from constrainx.cli._console import (
    TRACEBACK,
    print_line,
    print_table,
    report_user_errors,
    set_up_logging,
)
from constrainx.errors import ArgumentError, did_you_mean

# Where the class of each command is, in the order of the help text.
COMMANDS = {
    "quickstart": "_quickstart.Quickstart",
    "list": "_recipes.ListRecipes",
    "train": "_train.Train",
    "validate": "_train.Validate",
    "compare": "_compare.Compare",
    "resume": "_resume.Resume",
    "eval": "_resume.Evaluate",
    "certify": "_certify.Certify",
    "polish": "_polish.Polish",
    "verify": "_verify.Verify",
    "doctor": "_doctor.Doctor",
    "plan": "_plan.Plan",
    "launch": "_launch.Launch",
    "soak": "_soak.Soak",
    "export": "_export.Export",
    "report": "_report.Report",
    "new": "_recipes.NewRecipe",
    "cp": "_recipes.CopyRecipe",
    "data": "_data.Data",
    "completion": "_completion.Completion",
    "info": "_info.Info",
}


def main() -> None:
    """Runs the command that the arguments name."""
    arguments = [argument for argument in sys.argv[1:] if argument != TRACEBACK]
    set_up_logging()
    signal.signal(signal.SIGTERM, _end_by_signal)
    with report_user_errors():
        if not arguments or arguments[0] in ("-h", "--help"):
            _print_help()
            return
        name, *rest = arguments
        if name not in COMMANDS:
            raise ArgumentError(
                f"there is no command {name!r}.{did_you_mean(name, COMMANDS)} `constrainx --help` "
                "shows all."
            )
        load_command(name).start(rest, name=name)


def _end_by_signal(number: int, frame: object) -> None:
    """While a run trains, it listens itself, and saves."""
    del frame
    sys.stderr.write("constrainx: ended by SIGTERM while nothing was training. Nothing is lost.\n")
    raise SystemExit(128 + number)


def load_command(name: str) -> type[Command]:
    """Imports the class of a command, so that no command waits for the imports of another."""
    module, kind = COMMANDS[name].split(".")
    return getattr(importlib.import_module(f"constrainx.cli.{module}"), kind)


def _print_help() -> None:
    print_line("usage: constrainx COMMAND [ARGUMENTS]")
    print_line("")
    print_line("Train neural networks that must obey constraints.")
    print_line("")
    descriptions = {name: inspect.getdoc(load_command(name)) or "" for name in COMMANDS}
    print_table([(name, text.splitlines()[0]) for name, text in descriptions.items()])
    print_line("")
    print_line("`constrainx COMMAND --help` shows the arguments of a command.")
    print_line(f"`{TRACEBACK}`, anywhere, shows where in the code an error comes from.")
