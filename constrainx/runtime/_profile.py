"""A trace of some steps of a run, for TensorBoard and Perfetto."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any, Self

import jax

from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Which steps to trace, and where the trace goes.

    What a step computes is in the regions "loss", "residual" (of the constraints), "linearise",
    "solve" and "update", by which a viewer can group. Tracing slows steps down.

    >>> Profile.of_steps("20-24", folder="trace")
    Profile(first=20, last=24, folder=...Path('trace'))

    Attributes:
        first: the first step to trace, counted from 1, which includes its compilation.
        last: the last.
        folder: where to write it; TensorBoard looks for it there, and Perfetto opens the file
            perfetto_trace.json.gz.
    """

    first: int
    last: int
    folder: pathlib.Path | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", pathlib.Path(self.folder))
        if not 1 <= self.first <= self.last:
            raise ArgumentError(
                "`Profile` must have a first step of at least 1 and a last that is not before it, "
                f"got {self.first} and {self.last}."
            )

    @classmethod
    def of_steps(cls, steps: str, *, folder: pathlib.Path | str) -> Self:
        """The steps as a user writes them: "20", or "20-24"."""
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", steps)
        if not found:
            raise ArgumentError(f"steps to trace are written as 20 or as 20-24, got {steps!r}.")
        return cls(first=int(found[1]), last=int(found[2] or found[1]), folder=folder)


class Trace:
    """Traces the steps of a profile as they come; does nothing without one."""

    def __init__(self, profile: Profile | None):
        """Sets it up; nothing is written until the first step."""
        self._profile = profile
        self._is_on = False

    @contextlib.contextmanager
    def around(self, step: int, *, before: Any) -> Iterator[None]:
        """Marks a step.

        Args:
            step: its number, counted from 1.
            before: arrays to wait for, so that no earlier step is in the trace.
        """
        profile = self._profile
        if profile is None or not profile.first <= step <= profile.last:
            yield
            return
        if not self._is_on:
            jax.block_until_ready(before)
            jax.profiler.start_trace(profile.folder, create_perfetto_trace=True)
            self._is_on = True
        with jax.profiler.StepTraceAnnotation("step", step_num=step):
            yield

    def end_after(self, step: int, token: Any) -> str | None:
        """Writes the trace after its last step, and says so.

        Args:
            step: the number of the step that was taken.
            token: an array of it to wait for.
        """
        if self._profile is None or step < self._profile.last:
            return None
        jax.block_until_ready(token)
        return self.end()

    def end(self) -> str | None:
        """Writes what has been traced, if there is something, and says so."""
        if self._profile is None or not self._is_on:
            return None
        self._is_on = False
        jax.profiler.stop_trace()
        return f"traced steps {self._profile.first} to {self._profile.last}: {self._profile.folder}"
