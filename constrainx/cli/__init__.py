"""`constrainx` on the command line."""

from constrainx.cli._commands import main as main
