"""Checks of a trainer's arguments, made before anything is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from constrainx.data import Batches
from constrainx.errors import ArgumentError, ArgumentTypeError, did_you_mean
from constrainx.runtime import Sharding


def check_model(model: Any) -> None:
    """Raises unless it is a module whose random streams can be seeded again in each step."""
    if not isinstance(model, nnx.Module):
        raise ArgumentTypeError(
            f"`Trainer(model=...)` must be an nnx.Module, got {type(model).__name__}."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model, _is_not_random)):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ArgumentTypeError(
                f"`Trainer(model=...)` has a random key in {jax.tree_util.keystr(path)}, which "
                "would be the same in every step: keep it in an `nnx.Rngs`, whose streams are "
                "seeded anew, or take a key as an argument."
            )


def check_real(model: nnx.Module, wrt: Any) -> None:
    """Raises if trained parameters are complex: steps and constraints need real numbers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model, wrt)):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ArgumentTypeError(
                f"`Trainer(model=...)` has {leaf.dtype} parameters in "
                f"{jax.tree_util.keystr(path)}: train their real and imaginary parts as two real "
                "parameters, and put them together by `jax.lax.complex`."
            )


def check_batches(argument: str, value: Any) -> None:
    """Raises unless it comes from `constrainx.data`."""
    if not isinstance(value, Batches):
        raise ArgumentTypeError(
            f"`{argument}` must come from `constrainx.data`, for example "
            f"`cx.data.arrays({{'x': x}}, batch=128)`, got {type(value).__name__}."
        )


def check_count(argument: str, value: Any) -> None:
    """Raises unless it is None or a number of at least 1."""
    if value is not None and value < 1:
        raise ArgumentError(f"`{argument}` must be at least 1, got {value!r}.")


def check_decay(argument: str, value: float | None) -> None:
    """Raises unless it is None or can be the decay of a moving average."""
    if value is not None and not 0 <= value < 1:
        raise ArgumentError(f"`{argument}` must be in [0, 1), got {value!r}.")


def check_split(batch: int, sharding: Sharding, *, accumulate: int) -> None:
    """Raises unless each part of a batch can be spread over the devices evenly."""
    sharding.check_batch(batch)
    if batch % (accumulate * sharding.mesh.size):
        raise ArgumentError(
            f"`accumulate={accumulate}` parts of a batch of {batch} must be multiples of the "
            f"{sharding.mesh.size} devices."
        )


def check_measured(metric: str, names: Sequence[str]) -> None:
    """Raises unless the metric to monitor is one of those that the evaluation measures."""
    if metric not in names:
        raise ArgumentError(
            f"`Monitor(metric={metric!r})` is not measured: use one of {sorted(names)}."
            f"{did_you_mean(metric, names, cutoff=0.0)}"
        )


def _is_not_random(path: tuple[Any, ...], variable: Any) -> bool:
    del path
    return not isinstance(variable, nnx.RngState)
