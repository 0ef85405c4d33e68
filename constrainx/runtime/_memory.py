"""Memory that a process keeps from step to step, instead of asking for it each time."""

from __future__ import annotations

import ctypes
import sys

# Of glibc's malloc.h.
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8


def keep_memory() -> bool:
    """Makes the process keep memory that was freed, and returns whether that is possible.

    On a CPU, XLA allocates the results of each step, and glibc by default gets large blocks from
    the operating system and gives them back at once, so that each page is cleared anew in every
    step. Writing an array then takes four times as long as it needs; a step of a Swin took a fifth
    longer. In return the process holds its peak of memory, about a tenth more than without. Call it
    before JAX is first used, as the command line does. It needs glibc, which most Linux systems
    have.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Threads with arenas of their own would still map blocks beyond 64 MB.
    settings = {ARENA_MAX: 1, MMAP_MAX: 0, TRIM_THRESHOLD: 2**31 - 1}
    done = [mallopt(name, value) for name, value in settings.items()]
    return done == [1, 1, 1]
