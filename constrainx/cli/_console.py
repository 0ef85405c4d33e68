"""What the program prints: its own notes once, errors as a sentence, only warnings from others."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from constrainx.errors import UserError

TRACEBACK = "--traceback"


def set_up_logging() -> None:
    """Shows our own notes as plain lines, once each, and only warnings from other libraries."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return message not in seen and not seen.add(message)  # type: ignore[func-returns-value]

    # Orbax logs whole tracebacks of errors that it also raises, and that we report in a sentence.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    sys.unraisablehook = _show_unraisable
    handler = logging.StreamHandler()
    handler.addFilter(is_new)
    logger = logging.getLogger("constrainx")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


@contextlib.contextmanager
def report_user_errors() -> Iterator[None]:
    """Prints an error that the user can fix as one line, and exits with code 1.

    Any other exception is a bug, ours or in the user's recipe, and keeps its traceback. With
    ``--traceback`` on the command line, all of them do.
    """
    try:
        yield
    except UserError as error:
        if TRACEBACK in sys.argv:
            raise
        Console(stderr=True).print(
            f"error: {error}", markup=False, emoji=False, highlight=False, soft_wrap=True
        )
        atexit.register(_silence_stderr)
        raise SystemExit(1) from None


def print_line(text: str) -> None:
    """Prints text on one line, as it is, whatever names are in it: no markup, no wrapping."""
    Console().print(_join_lines(text), markup=False, emoji=False, highlight=False, soft_wrap=True)


def print_table(
    rows: Iterable[Sequence[str]], *, headings: Sequence[str] = (), title: str = ""
) -> None:
    """Prints cells as they are. `Text` keeps rich from reading ``[/b]`` in a name as markup."""
    if title:
        print_line(title)  # a table without rows would not show it
    table = Table(show_header=bool(headings), box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(Text(_join_lines(cell)) for cell in row))
    Console().print(table)


def print_metrics(title: str, metrics: Mapping[str, float]) -> None:
    """Prints one metric per line."""
    print_table([(name, f"{value:.4g}") for name, value in metrics.items()], title=title)


def _join_lines(text: str) -> str:
    return " ".join(text.splitlines())


def _silence_stderr() -> None:
    """While Python exits, hooks are gone already, but threads of other libraries still print."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _show_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    # After a checkpoint failed, TensorStore's threads still call an event loop that is closed.
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
