"""What changes in training: the arrays of a checkpoint, and the figures stored with them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int, PyTree


class Health(NamedTuple):
    """Whether steps were skipped because something in them was not finite.

    Attributes:
        skipped: how many.
        step: the last of them, or −1; the first, if the run stops at it.
        cause: what was not finite there, as a position in `Program.causes`.
    """

    skipped: Int[Array, ""]
    step: Int[Array, ""]
    cause: Int[Array, ""]


class State(NamedTuple):
    """All arrays that change in training, and all that a checkpoint holds.

    Randomness is not in it: that is a function of seed and step.

    Attributes:
        step: how many steps have been taken.
        parameters: what is trained.
        rest: what else the model keeps, such as batch statistics.
        optimizer: the optimizer's state.
        constraints: how the constraints fared, and multipliers; empty without constraints.
        ema: the moving average of the parameters; empty if there is none.
        health: whether every step has been finite.
    """

    step: Int[Array, ""]
    parameters: nnx.State
    rest: nnx.State
    optimizer: optax.OptState
    constraints: PyTree
    ema: PyTree
    health: Health


@dataclasses.dataclass(kw_only=True)
class Progress:
    """How far training has come. The loop updates it, and a checkpoint holds all of it.

    Attributes:
        state: the arrays.
        best: the best value of the monitored metric so far.
        without_best: how many evaluations ago that was.
        seconds: spent in steps.
    """

    state: State
    best: float | None = None
    without_best: int = 0
    seconds: float = 0.0

    @property
    def step(self) -> int:
        """How many steps have been taken."""
        return int(self.state.step)


def start_healthy() -> Health:
    """The health of a run whose steps have all been finite."""
    zero = jnp.zeros((), jnp.int32)
    return Health(zero, zero - 1, jnp.copy(zero))


def split_model(
    model: nnx.Module, wrt: Any
) -> tuple[nnx.GraphDef, nnx.State, nnx.State, nnx.State]:
    """The structure of a model, what is trained, its random streams, and the rest."""
    parts: Any = nnx.split(model, wrt, nnx.RngState, ...)
    graph, parameters, rngs, rest = parts
    return graph, nnx.as_pure(parameters), rngs, nnx.as_pure(rest)
