"""`constrainx` on the command line: a file for each command or small family of commands."""

from constrainx.cli._main import main as main
