"""The memory of a compiled step on each device."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device while a step runs.

    Attributes:
        arguments: the state and the batch.
        results: the new state, and metrics.
        reused: of the results, those that take the place of arguments.
        temporary: activations and all else that is gone after the step.
        code: the program.
    """

    arguments: int
    results: int
    reused: int
    temporary: int
    code: int

    @property
    def peak(self) -> int:
        """The most that a device needs at one time."""
        return self.arguments + self.results - self.reused + self.temporary + self.code


def read_memory(compiled: Any) -> Memory:
    """What XLA has assigned to a `jax.stages.Compiled`."""
    found = compiled.memory_analysis()
    return Memory(
        arguments=found.argument_size_in_bytes,
        results=found.output_size_in_bytes,
        reused=found.alias_size_in_bytes,
        temporary=found.temp_size_in_bytes,
        code=found.generated_code_size_in_bytes,
    )
