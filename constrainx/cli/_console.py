"""How the program speaks: its own notes once, errors as a sentence, other libraries not at all."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from rich.console import Console


def quiet() -> None:
    """Our own notes as plain lines, once each; of other libraries only warnings."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return message not in seen and not seen.add(message)  # type: ignore[func-returns-value]

    # Orbax logs whole tracebacks of what it also raises, and what we report in a sentence.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    sys.unraisablehook = _show
    handler = logging.StreamHandler()
    handler.addFilter(is_new)
    logger = logging.getLogger("constrainx")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """What a user can put right is a line on standard error, not a traceback."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, _expected()):
            raise
        Console(stderr=True).print(f"error: {error}", highlight=False, soft_wrap=True)
        atexit.register(_hush)
        raise SystemExit(1) from None


def _expected() -> tuple[type[Exception], ...]:
    """Imported when something went wrong, and not to show a help text."""
    from constrainx.data import DataNotFoundError, PreparationError
    from constrainx.runtime import CheckpointError, DistributedError, RunError
    from constrainx.trainers import NonFiniteError

    # Wrong arguments are a ValueError, also those that a recipe hands on.
    return (
        CheckpointError, DataNotFoundError, DistributedError, NonFiniteError, PreparationError,
        RunError, ValueError,
    )  # fmt: skip


def _hush() -> None:
    """While Python ends, hooks are gone already, but threads of other libraries are not."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _show(unraisable: sys.UnraisableHookArgs) -> None:
    # When a checkpoint fails, TensorStore's threads go on to tell an event loop that is gone.
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
