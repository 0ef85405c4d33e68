"""The loss and the error of a classifier, for batches with inputs "x" and classes "y"."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float


def cross_entropy(model: Any, batch: dict[str, Array]) -> Float[Array, " batch"]:
    """The cross-entropy of each example; its label is a class, or a probability for each class."""
    if batch["y"].ndim == 2:
        return optax.softmax_cross_entropy(model(batch["x"]), batch["y"])
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def is_wrong(model: Any, batch: dict[str, Array]) -> Float[Array, " batch"]:
    """One for each misclassified example and zero for the others; the mean is the error rate."""
    label = batch["y"] if batch["y"].ndim == 1 else jnp.argmax(batch["y"], axis=1)
    return (jnp.argmax(model(batch["x"]), axis=1) != label).astype(jnp.float32)
