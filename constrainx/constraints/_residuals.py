"""Residuals of a loss as soft rows, for steps of Gauss-Newton."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, PyTree

from constrainx.constraints._constraint import Constraint, Placement
from constrainx.errors import ArgumentTypeError


@dataclasses.dataclass(frozen=True)
class Residuals(Constraint):
    """Residuals r whose squares are to be small, as soft rows: a step of Gauss-Newton.

    With no loss beside it, the null-space step is that of Levenberg and Marquardt with a damping
    that follows the length of the rows,

        u = −γ Jᵀ(J Jᵀ + μ ḡ)⁻¹ r,

    and with ``NullSpace(momentum=0.9, trust=0.1)`` it is SPRING (Goldshlager, Abrahamsen and Lin,
    2024) with a trust region. Hard constraints may stand beside it. The residuals come near zero
    where the model can fit them all, and reach a stationary point of the mean of their squares
    if the batch stays the same. A row for each residual, as ``reduce`` says.

    >>> import jax, jax.numpy as jnp, optax, constrainx as cx
    >>> from flax import nnx
    >>> x = jnp.linspace(-1, 1, 8)[:, None]
    >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> fit = cx.Residuals(lambda model, batch, key: model(batch["x"]) - batch["y"])
    >>> optimizer = nnx.Optimizer(
    ...     model, cx.constrain(optax.identity(), fit, model=model), wrt=nnx.Param
    ... )
    >>> no_loss = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    >>> _ = optimizer.update(model, no_loss, batch={"x": x, "y": 3 * x + 1})
    >>> print(model.kernel[...].round(2), model.bias[...].round(2))
    [[3.]] [1.]

    Attributes:
        of: (model, batch, key) ↦ the residuals, any pytree of arrays with examples on the first
            axis. It should not draw from the key, so that rows on single examples stay cheap.
        damping: μ. The default is small, because a step that is too long is better cut by a trust
            region; more makes the step smoother where residuals contradict each other.
        placement: "update", so that no learning rate multiplies γ.
    """

    of: Callable[[Any, Any, Array], PyTree[Float[Array, ...]]]
    gamma: float | Callable[[Any], Any] = dataclasses.field(default=1.0, kw_only=True)
    damping: float | Callable[[Any], Any] = dataclasses.field(default=1e-6, kw_only=True)
    placement: Placement | None = dataclasses.field(default="update", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.of):
            raise ArgumentTypeError(
                "`Residuals(of=...)` must be a function (model, batch, key) ↦ residuals, got "
                f"{self.of!r}. Write `cx.Residuals(lambda model, batch, key: ...)`."
            )

    def residual(self, model: Any, batch: Any, *, key: Array) -> PyTree[Float[Array, ...]]:
        """Returns the residuals."""
        return self.of(model, batch, key)
