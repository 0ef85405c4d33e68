"""A trust region: steps no longer than their linearisation deserves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from constrainx.constraints import as_number
from constrainx.errors import ArgumentError
from constrainx.linalg import norm


def as_trust(value: Any, *, argument: str) -> float | Callable[[Any], Any]:
    """Returns the largest length of a step, a number above 0 or a schedule, or raises an error."""
    if callable(value):
        return value
    number = as_number(value, argument=argument, least=0, fix="None stands for any length.")
    if number == 0:
        raise ArgumentError(
            f"`{argument}` is the largest length of a step and must be above 0, got {value!r}: no "
            "parameter would move. None stands for any length."
        )
    return number


def shorten(
    update: PyTree, trust: float | Callable[[Any], Any], step: Int[Array, ""]
) -> tuple[PyTree, Float[Array, ""]]:
    """An update of no more than a length, and which part of its own length is left.

    Rows that the update obeys, J u = −γ c, are then obeyed with a smaller γ, and inequalities that
    hold still hold. A schedule that returns something that is not above zero makes it NaN.
    """
    length = norm(update)
    radius = jnp.asarray(trust(step) if callable(trust) else trust, length.dtype)
    radius = jnp.where((radius > 0) & (radius < math.inf), radius, jnp.nan)
    is_long = length > radius
    part = jnp.where(is_long, radius / jnp.where(is_long, length, 1), 1)
    part = jnp.where(jnp.isnan(radius), jnp.nan, part)
    shortened = jax.tree.map(lambda leaf: (part * leaf).astype(leaf.dtype), update)
    return shortened, part
