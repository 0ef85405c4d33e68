"""The guard of a step: whether all that it found, and all that it would keep, is finite."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from constrainx.runtime import by_path
from constrainx.trainers._state import State

# The parts of a state that the guard looks at, as an error names them. The moving average needs no
# look: it lies between parameters that were finite.
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

    The update alone does not tell: a gradient of 1e20 makes Adam's second moment infinite, and with
    it the update of that weight zero, now and in all later steps.

    Args:
        new: the state that the step would keep.
        old: the state before the step. Arrays that are the same in both are not looked at.
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
    """Paths of arrays that are not finite before the first step, where it means no harm.

    Such are a mask of −∞ that a model keeps, or the best loss so far that an optimizer keeps.
    """
    return frozenset(
        path
        for part in KEPT
        for path, leaf in _to_look_at(part, start).items()
        if not np.isfinite(np.asarray(leaf)).all()
    )


def _to_look_at(part: str, state: State) -> dict[str, Any]:
    """Arrays of a part by their path that may turn infinite unseen."""
    tree: PyTree = getattr(state, part)
    if part == "constraints" and tree != ():
        # The reports are not built on, and are not finite where a constraint has not acted.
        tree = tree.multipliers
    return {
        f"{part}.{path}": leaf
        for path, leaf in by_path(tree).items()
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
        # A finite update changes a finite parameter to a finite one, except in a small range.
        and (part != "parameters" or leaf.dtype == jnp.float16)
    }


def _sum(leaf: Array) -> Float[Array, ""]:
    """Is not finite if an entry is not, and else only where entries are near the largest number.

    XLA can compute a plain sum together with the leaf. On a CPU it takes a third of the time of
    `isfinite` and `all`.
    """
    wide = jnp.promote_types(leaf.dtype, jnp.float32)
    return jnp.abs(jnp.sum(leaf, dtype=wide)).astype(jnp.float32)
