"""No method at all: the optimizer alone."""

from __future__ import annotations

import dataclasses

from jaxtyping import PyTree

from constrainx.constraints import Composed
from constrainx.step._method import Optimize, Point, Taken


@dataclasses.dataclass(frozen=True)
class Unconstrained:
    """Trains as if there were no constraints, for comparison."""

    def init(self, constraints: Composed, parameters: PyTree) -> PyTree:
        """Nothing to remember."""
        del constraints, parameters
        return ()

    def take(
        self, point: Point, gradients: PyTree, optimize: Optimize, multipliers: PyTree
    ) -> Taken:
        """One step of the optimizer; the constraints cost nothing and report nothing."""
        del point
        return Taken(*optimize(gradients), {}, multipliers)
