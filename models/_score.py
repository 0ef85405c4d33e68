"""The score network of Chao et al. (2022), for points in the plane."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class Swish(nnx.Module):
    """x · sigmoid(β x) with a learnable β."""

    def __init__(self) -> None:
        self.beta = nnx.Param(jnp.ones(()))

    def __call__(self, x: Array) -> Array:
        """Applies the function to each entry."""
        return x * jax.nn.sigmoid(self.beta[...] * x)


class ScoreNetwork(nnx.Module):
    """s(x, σ) = (x − h(x, σ)) / σ, where h is a perceptron whose last layer also sees log σ.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> ScoreNetwork(rngs=nnx.Rngs(0))(jnp.zeros((5, 2)), jnp.ones(5)).shape
    (5, 2)
    """

    def __init__(self, *, widths: Sequence[int] = (64, 128, 256), rngs: nnx.Rngs):
        pairs = itertools.pairwise((2, *widths))
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairs])
        self.activations = nnx.List([Swish() for _ in widths])
        self.noise = nnx.List([nnx.Linear(1, 1, rngs=rngs) for _ in range(3)])
        self.noise_activations = nnx.List([Swish() for _ in range(2)])
        self.last = nnx.Linear(widths[-1] + 1, 2, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch 2"], sigma: Float[Array, " batch"]
    ) -> Float[Array, "batch 2"]:
        """The score at each point, for noise of the given standard deviation."""
        hidden = x
        for layer, activation in zip(self.layers, self.activations, strict=True):
            hidden = activation(layer(hidden))
        level = self.noise[0](jnp.log(sigma)[:, None])
        for layer, activation in zip(self.noise[1:], self.noise_activations, strict=True):
            level = layer(activation(level))
        h = self.last(jnp.concatenate([hidden, level], axis=1))
        return (x - h) / sigma[:, None]
