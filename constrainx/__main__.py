"""`python -m constrainx`."""

from constrainx.cli._commands import main

main()
