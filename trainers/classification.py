"""The loss and the error of a classifier, for batches with inputs "x" and classes "y"."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float


def cross_entropy(model: Any, batch: dict[str, Array]) -> Float[Array, " batch"]:
    """The cross-entropy of each example."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def is_wrong(model: Any, batch: dict[str, Array]) -> Float[Array, " batch"]:
    """One for each misclassified example and zero for the others; the mean is the error rate."""
    return (jnp.argmax(model(batch["x"]), axis=1) != batch["y"]).astype(jnp.float32)
