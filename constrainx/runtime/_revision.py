"""The Git revision of the current folder, read without running anything that a repository names."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

# Commands that a repository's own configuration can name, and that `git describe --dirty` would run
# or pass on to submodules.
_OFF = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "diff.ignoreSubmodules": "all",
}


def read_revision() -> str | None:
    """The revision, with a plus if there are uncommitted changes; None outside of a repository.

    A repository may come from somebody else, as an archive for example, so its hooks, its monitor
    of files and its filters are switched off.
    """
    filters = _run_git(["config", "--name-only", "--get-regexp", r"^filter\."], _OFF) or ""
    off = dict(_OFF)
    for name in filters.splitlines():
        off[name] = "false" if name.endswith(".required") else ""
    return _run_git(["describe", "--always", "--dirty=+"], off)


def _run_git(arguments: list[str], settings: Mapping[str, str]) -> str | None:
    """What a command of Git prints, with these settings above those of the repository."""
    # By the environment, because `git -c` cannot set a name that contains "=".
    environment = {**os.environ, "GIT_CONFIG_COUNT": str(len(settings))}
    for index, (name, value) in enumerate(settings.items()):
        environment |= {f"GIT_CONFIG_KEY_{index}": name, f"GIT_CONFIG_VALUE_{index}": value}
    try:
        result = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return result.stdout.strip() or None
