"""The events of a run that a program reads back from its metrics.jsonl, and their wording."""

from __future__ import annotations

import re
from collections.abc import Sequence

_RESUMED = "resumed from step "


def describe_resume(step: int, set_aside: Sequence[int] = (), changes: Sequence[str] = ()) -> str:
    """The event of a run that continues from a checkpoint.

    >>> describe_resume(200, [300, 400])
    'resumed from step 200; set aside the later checkpoints [300, 400]'

    Args:
        step: of the checkpoint.
        set_aside: steps of checkpoints that lay ahead of it.
        changes: settings that differ from before, a phrase for each.
    """
    later = f"; set aside the later checkpoints {list(set_aside)}" if set_aside else ""
    other = f"; continues with {', '.join(changes)}" if changes else ""
    return f"{_RESUMED}{step}{later}{other}"


def parse_resume(message: str) -> int | None:
    """The step that `describe_resume` was given; None for other events.

    >>> parse_resume(describe_resume(200, [300])), parse_resume("saved, can be resumed")
    (200, None)
    """
    found = re.match(rf"{_RESUMED}(\d+)", message)
    return int(found[1]) if found else None
