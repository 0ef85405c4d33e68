"""`Constraint`: what must hold of a network, as an object."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from constrainx.constraints._reduce import Reduction, as_reduction, flatten
from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraint:
    """Something that must hold of a model; subclass it and write ``residual``.

    >>> import jax.numpy as jnp, constrainx as cx
    >>> class PeriodicIn2Pi(cx.Constraint):
    ...     def residual(self, model, batch, *, key):
    ...         return model(batch["x"] + 2 * jnp.pi) - model(batch["x"])
    >>> PeriodicIn2Pi(gamma=0.5).label
    'periodic-in2-pi'

    A subclass with fields of its own is a dataclass, too: ``@dataclasses.dataclass(frozen=True)``.

    Attributes:
        name: how it is called in logs; by default after the class.
        gamma: the part of the violation that a step removes to first order, J Δθ = −γ c: a number
            or an Optax schedule. One is a full Gauss-Newton step.
        wrt: an NNX filter; the parameters that the constraint may move.
        reduce: how residuals become rows: "none", "norm", "mean", "rms", `Norm`, `Sketch`, or any
            object with a method ``__call__(self, residual, *, key)``, see `Reduction`.
        examples: how many examples of the batch it looks at, the first so many; None for all. Its
            cost is in proportion.
        start: the first step at which it acts.
        every: it acts at each such step only.
        tolerance: the violation at which it counts as met.
    """

    kind: ClassVar[Literal["equality", "inequality"]] = "equality"

    name: str | None = None
    gamma: float | Callable[[Any], Any] = 0.1
    wrt: Any = nnx.Param
    reduce: str | Reduction = "none"
    examples: int | None = None
    start: int = 0
    every: int = 1
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        owner = type(self).__name__
        as_reduction(self.reduce, owner=owner)
        if not callable(self.gamma) and not (
            isinstance(self.gamma, int | float) and self.gamma >= 0
        ):
            raise ArgumentError(
                f"`{owner}(gamma=...)` must be a number of at least 0 or an Optax schedule, got "
                f"{self.gamma!r}."
            )
        if self.examples is not None and self.examples < 1:
            raise ArgumentError(
                f"`{owner}(examples=...)` must be at least 1, or None for the whole batch, got "
                f"{self.examples!r}."
            )
        if self.start < 0 or self.every < 1:
            raise ArgumentError(
                f"`{owner}` acts from step `start` on, every `every` steps: these must be at least "
                f"0 and 1, got start={self.start!r}, every={self.every!r}."
            )
        if self.tolerance < 0:
            raise ArgumentError(
                f"`{owner}(tolerance=...)` must be at least 0, got {self.tolerance!r}."
            )

    def residual(self, model: Any, batch: Any, *, key: Array) -> PyTree[Float[Array, ...]]:
        """What is zero when the constraint holds: any pytree of arrays.

        Args:
            model: the module that the constraint is attached to.
            batch: the training batch, as the loss sees it.
            key: for constraints that draw samples; a new one each step.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a method `residual(self, model, batch, *, key)` that "
            "returns what is zero when the constraint holds."
        )

    def violation(self, model: Any, batch: Any, key: Array) -> Float[Array, ""]:
        """By how much the constraint fails, for people: the root mean square of the residual."""
        return jnp.sqrt(jnp.mean(jnp.square(flatten(self.residual(model, batch, key=key)))))

    @property
    def label(self) -> str:
        """The name, or the class's name in lower case with hyphens."""
        return self.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", type(self).__name__).lower()

    @property
    def reduction(self) -> Reduction:
        """``reduce`` as an object."""
        return as_reduction(self.reduce, owner=type(self).__name__)
