"""A multi-layer perceptron."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from flax import nnx
from jaxtyping import Array, Float

from constrainx.errors import ArgumentError


class MLP(nnx.Module):
    """Dense layers with a smooth activation between them.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> MLP((20, 64, 9), rngs=nnx.Rngs(0))(jnp.ones((5, 20))).shape
    (5, 9)
    """

    def __init__(
        self,
        widths: Sequence[int],
        *,
        activation: Callable[[Array], Array] = nnx.silu,
        rngs: nnx.Rngs,
    ):
        if len(widths) < 2:
            raise ArgumentError(
                f"`widths` must have at least two entries, inputs and outputs, got {tuple(widths)}."
            )
        self.activation = activation
        self.layers = nnx.List(
            [
                nnx.Linear(inputs, outputs, rngs=rngs)
                for inputs, outputs in itertools.pairwise(widths)
            ]
        )

    def __call__(self, x: Float[Array, "batch inputs"]) -> Float[Array, "batch outputs"]:
        """Applies the layers, with the activation after all but the last."""
        *hidden, last = self.layers
        for layer in hidden:
            x = self.activation(layer(x))
        return last(x)
