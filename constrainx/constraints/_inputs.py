"""Where in a batch the examples are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from constrainx.errors import ArgumentError, ArgumentTypeError, did_you_mean


def select_inputs(batch: Any, field: str | int, *, owner: str) -> Array:
    """Returns the examples in a batch: its entry of that name or position, or the batch itself.

    >>> select_inputs({"x": np.ones((4, 2)), "y": np.ones(4)}, "x", owner="Equivariance").shape
    (4, 2)

    Args:
        batch: an array, a dictionary, a tuple, or an object with attributes.
        field: a key, an attribute or a position.
        owner: the constraint, for errors.
    """
    if isinstance(batch, jax.Array | np.ndarray):
        return jnp.asarray(batch)
    if isinstance(batch, Mapping):
        if field in batch:
            return jnp.asarray(batch[field])
        raise ArgumentError(
            f"`{owner}(inputs={field!r})` is not in the batch, which has {sorted(map(str, batch))}."
            f"{did_you_mean(field, batch)}"
        )
    if isinstance(field, int) and isinstance(batch, tuple | list) and field in range(len(batch)):
        return jnp.asarray(batch[field])
    if isinstance(field, str) and hasattr(batch, field):
        return jnp.asarray(getattr(batch, field))
    raise ArgumentTypeError(
        f"`{owner}(inputs={field!r})` is not in the batch. It must be an array, a dictionary with "
        "this key, an object with this attribute, or a tuple with `inputs` a position in it, got "
        f"{type(batch).__name__}."
    )
