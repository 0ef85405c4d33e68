"""The error for a checkpoint that cannot be read or written, and its wording."""

from __future__ import annotations

from constrainx.errors import UserError


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be read or written.

    Attributes:
        step: of the checkpoint that could not be written, or None.
        finding: what is wrong with it, if it is damaged, without advice.
    """

    step: int | None = None
    finding: str = ""


def describe_error(error: Exception) -> str:
    """One short line about an error of Orbax, TensorStore or the operating system."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = lines[0]
    # Tensorstore begins with the array and ends with the operating system's message.
    short = line if len(line) <= 300 else f"{line[:120]} … {line[-170:]}"
    return f"{type(error).__name__}: {short}"
