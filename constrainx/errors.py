"""Exceptions for mistakes of the user, whose messages say how to fix them.

The command line prints these, and only these, as one sentence; anything else is a bug in this
library or in the user's own code, and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class UserError(Exception):
    """Something that the user can fix."""


class ArgumentError(UserError, ValueError):
    """An argument has a value that it cannot have."""


class ArgumentTypeError(UserError, TypeError):
    """An argument is of the wrong kind."""


class MissingPackageError(UserError, ImportError):
    """An optional package is not installed."""


def did_you_mean(word: Any, choices: Iterable[Any], *, cutoff: float = 0.3) -> str:
    """A hint to append to a message: the nearest choice, or nothing if none is near.

    >>> "there is no recipe 'o3-inertai'." + did_you_mean("o3-inertai", ["o3-inertia", "pinn"])
    "there is no recipe 'o3-inertai'. Did you mean 'o3-inertia'?"
    >>> did_you_mean("zzz", ["mean", "rms"])
    ''

    Args:
        word: what the user wrote.
        choices: what could have been meant.
        cutoff: how similar the nearest must be, from 0 to 1.
    """
    near = difflib.get_close_matches(str(word), map(str, choices), n=1, cutoff=cutoff)
    return suggest(near[0]) if near else ""


def suggest(choice: Any) -> str:
    """A hint to append to a message, if it is known what was probably meant.

    >>> "runs/a is not a run." + suggest("runs/a/seed0")
    "runs/a is not a run. Did you mean 'runs/a/seed0'?"
    """
    return f" Did you mean {str(choice)!r}?"


def check_choice(
    argument: str, value: Any, choices: Iterable[Any], *, owner: str | None = None
) -> None:
    """Raises unless the value is one of the choices.

    >>> check_choice("method", "penalty", ["penalty", "none"])
    >>> check_choice("method", "penatly", ["penalty", "none"])
    Traceback (most recent call last):
    constrainx.errors.ArgumentError: `method='penatly'` must be one of ['penalty', 'none']. ...

    Args:
        argument: its name, as the user knows it.
        value: what was given.
        choices: what is allowed.
        owner: the function or class that the argument belongs to.
    """
    allowed = list(choices)
    if value not in allowed:
        hint = did_you_mean(value, allowed, cutoff=0.0)
        written = f"{argument}={value!r}" if owner is None else f"{owner}({argument}={value!r})"
        raise ArgumentError(f"`{written}` must be one of {allowed}.{hint}")
