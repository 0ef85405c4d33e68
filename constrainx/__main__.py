"""`python -m constrainx`."""

from constrainx.cli import main

main()
