"""Fields with a symmetric Jacobian, which are gradients of a potential."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from constrainx.constraints._constraint import Constraint
from constrainx.constraints._inputs import select_inputs
from constrainx.constraints._numbers import as_count
from constrainx.constraints.reductions import check_residual
from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class JacobianSymmetry(Constraint):
    """J = Jᵀ for the Jacobian J of a field s: ℝᵈ → ℝᵈ, at the examples of the batch.

    Where that holds on all of ℝᵈ, s is the gradient of a potential, as the score of a density is.
    The squared residuals of an example add up to ½‖J − Jᵀ‖²_F, exactly or in expectation:

    - ``probes=None``: the upper triangle of J − Jᵀ, shape (examples, d(d−1)/2), from d forward-mode
      derivatives. Exact; for small d.
    - ``probes=k``: rᵢ = wᵢᵀ(J − Jᵀ)vᵢ / √(2k) with independent random signs vᵢ and wᵢ, shape
      (examples, k). J is never formed, as wᵀ(J − Jᵀ)v = wᵀ(J v) − vᵀ(J w) needs two forward-mode
      derivatives only. Since E[(wᵀA v)²] = ‖A‖²_F, the sum Σ rᵢ² is an unbiased estimate of
      ½‖J − Jᵀ‖²_F, and it is zero for every draw if and only if J is symmetric.

    Examples must not interact in the field, as they do in a batch normalisation in training mode.

    Attributes:
        of: (model, inputs) ↦ s(inputs), batched, in the shape of the inputs; by default the model
            itself. Where the field depends on more, such as a noise level, ``of`` may also take the
            batch by that name: ``of=lambda model, x, batch: model(x, batch["sigma"])``.
        inputs: where the examples are in the batch, as in `Equivariance`.
        probes: the number of pairs of random vectors for each example; None for the whole Jacobian.
    """

    of: Callable[..., Array] | None = None
    _: dataclasses.KW_ONLY
    inputs: str | int = "x"
    probes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probes is not None:
            fix = "Use None for the whole Jacobian."
            probes = as_count(self.probes, argument="JacobianSymmetry(probes=...)", fix=fix)
            object.__setattr__(self, "probes", probes)

    def residual(self, model: Any, batch: Any, *, key: Array) -> Float[Array, "examples rows"]:
        """Returns the upper triangle of J − Jᵀ, or random combinations of its entries."""
        field, x = self._flatten_field(model, batch)
        size = x.shape[1]
        if self.probes is None:
            basis = jnp.broadcast_to(jnp.eye(size, dtype=x.dtype)[:, None], (size, *x.shape))
            jacobian = jnp.moveaxis(_push_forward(field, x, basis), 0, -1)
            above = np.triu_indices(size, k=1)
            return (jacobian - jnp.swapaxes(jacobian, 1, 2))[:, *above]
        first, second = jax.random.rademacher(key, (2, self.probes, *x.shape), x.dtype)
        moved = _push_forward(field, x, jnp.concatenate([first, second]))
        forward, backward = moved[: self.probes], moved[self.probes :]
        products = jnp.sum(second * forward - first * backward, axis=-1)
        return products.T / math.sqrt(2 * self.probes)

    def violation(self, model: Any, batch: Any, key: Array) -> Float[Array, ""]:
        """Returns the mean over examples of ½‖J − Jᵀ‖²_F.

        With probes this is an unbiased estimate, ½‖(J − Jᵀ)v‖² from J v and Jᵀv, which varies far
        less than the squared residual.
        """
        if self.probes is None:
            residual = self.residual(model, batch, key=key)
            return jnp.mean(jnp.sum(jnp.square(_widen(residual)), axis=-1))
        field, x = self._flatten_field(model, batch)
        probes = jax.random.rademacher(key, (self.probes, *x.shape), x.dtype)
        _, pull = jax.vjp(field, x)
        difference = _push_forward(field, x, probes) - jax.vmap(pull)(probes)[0]
        return jnp.mean(jnp.sum(jnp.square(_widen(difference)), axis=-1)) / 2

    def scale(self, model: Any, batch: Any, key: Array) -> Float[Array, ""]:
        """Returns the mean over examples of 2‖J‖²_F, which the violation can be at most.

        With probes v this is an unbiased estimate, 2‖J v‖².
        """
        field, x = self._flatten_field(model, batch)
        if self.probes is None:
            basis = jnp.eye(x.shape[1], dtype=x.dtype)[:, None]
            probes = jnp.broadcast_to(basis, (x.shape[1], *x.shape))
            count = 1
        else:
            probes = jax.random.rademacher(key, (self.probes, *x.shape), x.dtype)
            count = self.probes
        squares = jnp.square(_widen(_push_forward(field, x, probes)))
        return 2 * jnp.sum(squares) / (count * x.shape[0])

    def _flatten_field(
        self, model: Any, batch: Any
    ) -> tuple[Callable[[Array], Array], Float[Array, "examples d"]]:
        """Returns the field as a function of flat vectors, and the examples as flat vectors."""
        x = select_inputs(batch, self.inputs, owner="JacobianSymmetry")
        of = self.of or (lambda model, x: model(x))
        extra = {"batch": batch} if "batch" in inspect.signature(of).parameters else {}

        def field(flat: Float[Array, "examples d"]) -> Float[Array, "examples d"]:
            values = of(model, flat.reshape(x.shape), **extra)
            check_residual(values, owner=self.label)
            if not isinstance(values, jax.Array) or values.shape != x.shape:
                raise ArgumentError(
                    "`JacobianSymmetry(of=...)` must return the field in the shape of its inputs, "
                    f"{x.shape}, got {jax.tree.map(jnp.shape, values)}."
                )
            return values.reshape(flat.shape)

        if x.ndim < 2 or math.prod(x.shape[1:]) < 2:
            raise ArgumentError(
                "`JacobianSymmetry(inputs=...)` must be a batch of points with at least two "
                f"coordinates, got shape {x.shape}."
            )
        return field, x.reshape(x.shape[0], -1)


def _push_forward(
    field: Callable[[Array], Array], x: Array, tangents: Float[Array, "k examples d"]
) -> Float[Array, "k examples d"]:
    """Returns J t for each tangent, with one evaluation of the field."""
    return jax.vmap(lambda tangent: jax.jvp(field, (x,), (tangent,))[1])(tangents)


def _widen(array: Array) -> Array:
    """Converts to at least single precision."""
    return array.astype(jnp.result_type(jnp.float32, array))
