"""LeNet-5, with features that can be equivariant to quarter turns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from flax import nnx
from jaxtyping import Array, Float

from constrainx.errors import ArgumentError


class LeNet(nnx.Module):
    """Two convolutions with pooling, then three dense layers.

    Convolutions pad with zeros to keep the size, and pooling windows tile the image. A rotation of
    the input by quarter turns therefore rotates the features exactly, if the kernels allow it.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> model = LeNet(rngs=nnx.Rngs(0))
    >>> model(jnp.ones((2, 28, 28, 1))).shape, model.features(jnp.ones((2, 28, 28, 1))).shape
    ((2, 10), (2, 7, 7, 16))
    """

    def __init__(
        self,
        *,
        size: int = 28,
        inputs: int = 1,
        channels: Sequence[int] = (8, 16),
        hidden: Sequence[int] = (120, 84),
        classes: int = 10,
        rngs: nnx.Rngs,
    ):
        if size % 4:
            raise ArgumentError(f"`size` must be a multiple of 4, to be pooled twice, got {size}.")
        first, second = channels
        self.first = nnx.Conv(inputs, first, (5, 5), rngs=rngs)
        self.second = nnx.Conv(first, second, (5, 5), rngs=rngs)
        widths = (second * (size // 4) ** 2, *hidden, classes)
        self.head = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(widths)])

    def features(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h//4 w//4 channels"]:
        """The output of the convolutions."""
        x = nnx.avg_pool(nnx.relu(self.first(x)), (2, 2), strides=(2, 2))
        return nnx.avg_pool(nnx.relu(self.second(x)), (2, 2), strides=(2, 2))

    def __call__(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch classes"]:
        """The logits."""
        x = self.features(x)
        x = x.reshape(x.shape[0], -1)
        *hidden, last = self.head
        for layer in hidden:
            x = nnx.relu(layer(x))
        return last(x)
