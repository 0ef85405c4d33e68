"""Constraints on what a model returns for an input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from constrainx.constraints._constraint import Constraint
from constrainx.constraints._inputs import select_inputs
from constrainx.constraints._numbers import as_number
from constrainx.constraints.reductions import check_residual, flatten
from constrainx.errors import ArgumentTypeError


@dataclasses.dataclass(frozen=True)
class OutputConstraint(Constraint):
    """What must hold of an input x and the output y for it: `OutputEquals` or `OutputAtMost`.

    Attached to a model it acts in training, like any constraint; given to `Feasible` it holds at
    inference, for every input.

    Attributes:
        value: what ``of`` must be, or must not exceed.
        of: (x, y) ↦ any pytree of arrays, for one example: x and y have no axis for the batch.
        inputs: where in a training batch the inputs are: a key, an attribute or a position.
        tolerance: the largest violation of an entry that counts as met, in training and by
            `Feasible`.
    """

    value: float
    of: Callable[[Any, Any], PyTree[Float[Array, ...]]]
    inputs: str | int = "x"
    tolerance: float = dataclasses.field(default=1e-5, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        value = as_number(self.value, argument=f"{owner}(value=...)")
        object.__setattr__(self, "value", value)
        if not callable(self.of):
            raise ArgumentTypeError(
                f"`{owner}(of=...)` must be a function of x and y, the input and output of one "
                f"example, got {self.of!r}. Write `of=lambda x, y: ...`."
            )

    def excess(self, x: PyTree, y: PyTree) -> Float[Array, " rows"]:
        """Returns ``of(x, y)`` − value for one example, in one vector."""
        values = self.of(x, y)
        # Before the subtraction, which would turn integers into floating-point numbers.
        check_residual(values, owner=self.label)
        return flatten(values, owner=self.label) - self.value

    def residual(self, model: Any, batch: Any, *, key: Array) -> Float[Array, "batch rows"]:  # noqa: ARG002
        """Returns ``of(x, model(x))`` − value for each example."""
        x = select_inputs(batch, self.inputs, owner=type(self).__name__)
        return jax.vmap(self.excess)(x, model(x))

    def violation(self, model: Any, batch: Any, key: Array) -> Float[Array, ""]:
        """Returns the largest violation of an entry."""
        return jnp.max(self.measure(self.residual(model, batch, key=key)))

    def measure(self, excess: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
        """Returns by how much each entry fails."""
        return jnp.maximum(excess, 0) if self.kind == "inequality" else jnp.abs(excess)


@dataclasses.dataclass(frozen=True)
class OutputEquals(OutputConstraint):
    """of(x, y) = value for the output y = model(x), such as a balance that must be kept.

    >>> import jax.numpy as jnp, constrainx as cx
    >>> shares = cx.OutputEquals(1.0, of=lambda x, y: jnp.sum(y))
    >>> batch = {"x": jnp.array([[0.25, 0.75], [1.0, 1.0]])}
    >>> print(shares.residual(lambda x: x, batch, key=None))
    [[0.]
     [1.]]
    """


@dataclasses.dataclass(frozen=True)
class OutputAtMost(OutputConstraint):
    """of(x, y) ≤ value for the output y = model(x), in each entry, such as a limit on each flow.

    In training, only rows that are violated, or would be after the step, act; see `AtMost`.
    """

    kind: ClassVar[Literal["equality", "inequality"]] = "inequality"

    gamma: float | Callable[[Any], Any] = dataclasses.field(default=1.0, kw_only=True)
