"""The guard of a step: checks that all it computed, and all it would keep, is finite."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from constrainx.runtime import by_path
from constrainx.trainers._state import State

# The parts of a state that the guard checks, as an error names them. The moving average needs no
# check: it lies between parameters that were finite.
KEPT = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "rest": "batch statistics, or another variable that is not trained",
    "constraints": "multipliers of the constraints",
}


def name_causes(constraints: Sequence[str]) -> tuple[str, ...]:
    """What may not be finite, in the order of `find_not_finite`."""
    names = (f"constraint {name!r}" for name in constraints)
    return ("loss", *names, "gradient or update", *KEPT.values())


def find_not_finite(
    new: State,
    old: State,
    *,
    loss: Array,
    violations: Sequence[tuple[Array, Array]],
    update_norm: Array,
    exempt: Collection[str],
) -> Bool[Array, " causes"]:
    """Tells for each cause whether it is not finite.

    Checking the update is not enough: a gradient of 1e20 makes Adam's second moment infinite, and
    then the update of that weight is zero, now and in all later steps.

    Args:
        new: the state that the step would keep.
        old: the state before the step. Arrays that are the same in both are not checked.
        loss: of this step.
        violations: of each constraint, and whether it acted.
        update_norm: the norm of the update.
        exempt: paths in the state that need not be finite, see `find_exempt`.
    """
    flags = [
        ~jnp.isfinite(loss),
        *(is_active & ~jnp.isfinite(violation) for violation, is_active in violations),
        ~jnp.isfinite(update_norm),
    ]
    for part in KEPT:
        before = _to_look_at(part, old)
        sums = [
            _sum(leaf)
            for path, leaf in _to_look_at(part, new).items()
            if path not in exempt and leaf is not before.get(path)
        ]
        flags.append(~jnp.isfinite(sum(sums, jnp.zeros(()))))
    return jnp.stack(flags)


def find_exempt(start: State) -> frozenset[str]:
    """Paths of arrays that are not finite before the first step, and so on purpose.

    Examples are a mask of −∞ in a model, and the best loss so far in an optimizer.
    """
    return frozenset(
        path for path, leaf in _numbers(start).items() if not np.isfinite(np.asarray(leaf)).all()
    )


def find_spoilt(state: State, exempt: Collection[str]) -> list[str]:
    """The paths of arrays that are not finite in a state from which a run is to continue."""
    numbers = {path: leaf for path, leaf in _numbers(state).items() if path not in exempt}
    # Arrays may be spread over processes, and are reduced where they are.
    sound = jax.jit(lambda leaves: [jnp.isfinite(leaf).all() for leaf in leaves])(
        list(numbers.values())
    )
    return [path for path, is_finite in zip(numbers, sound, strict=True) if not is_finite]


def _numbers(state: State) -> dict[str, Any]:
    """All arrays on which later steps depend, or that are the result, by their path."""
    found: dict[str, Any] = {}
    for part in (*KEPT, "ema"):
        tree: PyTree = getattr(state, part)
        if part == "constraints" and tree != ():
            # No step depends on the reports, which are not finite where a constraint has not acted.
            tree = tree.multipliers
        found |= {f"{part}.{path}": leaf for path, leaf in by_path(tree).items()}
    return {path: leaf for path, leaf in found.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}


def _to_look_at(part: str, state: State) -> dict[str, Any]:
    """The arrays of a part that may become infinite unnoticed, by their path."""
    return {
        path: leaf
        for path, leaf in _numbers(state).items()
        if path.startswith(f"{part}.")
        # A finite update changes a finite parameter to a finite one, except in a small range.
        and (part != "parameters" or leaf.dtype == jnp.float16)
    }


def _sum(leaf: Array) -> Float[Array, ""]:
    """Not finite if an entry is not; otherwise only if entries are near the largest number.

    XLA can compute a plain sum together with the leaf. On a CPU it takes a third of the time of
    `isfinite` and `all`.
    """
    wide = jnp.promote_types(leaf.dtype, jnp.float32)
    return jnp.abs(jnp.sum(leaf, dtype=wide)).astype(jnp.float32)
