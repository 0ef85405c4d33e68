"""What a trainer polishes with when training has ended."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree

from constrainx.linalg import Solver


@dataclasses.dataclass(frozen=True, kw_only=True)
class Polish:
    """How a trained model is polished, see `constrainx.polish`.

    The constraints are to hold at the first batches of the training data, as a step would see
    them; their violations are measured on the held-out data as well.

    Attributes:
        batches: how many batches of the training data to use.
        weight: how much a change of the outputs at these points counts; None for not at all, and
            ``math.inf`` for outputs that must not change.
        of: (model, batch) ↦ these outputs; ``model(batch["x"])`` by default.
        tolerance: the violation at which it ends; each constraint's own if left out.
        most_loss: what the loss at these points must not exceed.
        draws: how many keys a constraint that draws has at each batch.
        max_steps: how many steps to take at most.
        solver: of each step.
    """

    batches: int = 1
    weight: float | None = 10.0
    of: Callable[[Any, Any], PyTree] | None = None
    tolerance: float | None = None
    most_loss: float = math.inf
    draws: int = 1
    max_steps: int = 50
    solver: Solver | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Those of `constrainx.polish`, where they have the same names."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        weight = fields.pop("weight")
        return fields if weight is None else {**fields, "weight": weight}
