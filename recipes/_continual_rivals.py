"""Other ways to keep what was learnt, as a constraint and as a method."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from constrainx.constraints import Constraint
from constrainx.recipes._continual import weigh_mean
from constrainx.step import Optimize, Point, Taken, report_rows
from constrainx.trainers.classification import cross_entropy


@dataclasses.dataclass(frozen=True)
class NotWorse(Constraint):
    """The loss on examples from the memory must not grow: A-GEM (Chaudhry and others, 2019).

    The row is zero by definition, so the step only removes from a gradient what would increase it.
    """

    kind: ClassVar[Literal["equality", "inequality"]] = "inequality"

    examples_drawn: int = 64

    def residual(self, model: Any, batch: Any, *, key: Array) -> Float[Array, " one"]:  # noqa: ARG002
        """Returns the loss minus itself."""
        drawn, weights = model.memory.draw(self.examples_drawn, key)
        losses = cross_entropy(model, drawn)
        mean = weigh_mean(losses, weights)
        return (mean - jax.lax.stop_gradient(mean))[None]


@dataclasses.dataclass(frozen=True)
class InputNullSpace:
    """Projects updates of each layer off the inputs of earlier tasks: Adam-NSCL.

    Wang, Li, Sun and Xu, "Training networks in null space of feature covariance for continual
    learning", 2021. What a layer returns for inputs in the span of the earlier ones stays the same,
    up to the share of their squares that was given up. The projectors are dense, one a layer.
    """

    def init(self, constraints: Any, parameters: PyTree) -> PyTree:
        """Nothing to remember."""
        del constraints, parameters
        return ()

    def take(
        self, point: Point, gradients: PyTree, optimize: Optimize, multipliers: PyTree
    ) -> Taken:
        """One step; the constraints are only measured."""
        update, state = optimize(gradients)
        layers = dict(update["network"]["layers"])
        for index, projector in enumerate(point.model.projectors):
            layer = layers[index]
            stacked = jnp.concatenate([layer["kernel"], layer["bias"][None]])
            allowed = projector[...] @ stacked
            layer["kernel"], layer["bias"] = allowed[:-1], allowed[-1]
        return Taken(update, state, report_rows(point, point.rows(point.parameters)), multipliers)
