"""What is decided before the first step: how to solve, the scales of rows, what rounding hides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from constrainx.linalg import LSMR, Solver
from constrainx.polishing._steps import IterativeSteps, Lengths, Steps, StoredSteps, fits
from constrainx.polishing._system import Given, System

# Iterations of the solver in one step. More seldom pay where rows are nearly dependent.
MOST_ITERATIONS = 1000
# What outputs that are to stay as they are may change by, in units of rounding.
KEPT = 100


def pick_steps(system: System, moved: list[Array], given: Given, solver: Solver | None) -> Steps:
    """Rows are stored if there is room, and no solver was given."""
    shapes = jax.eval_shape(lambda m, g: (system.rows(m, g), system.outputs(m, g)), moved, given)
    rows = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    columns = sum(math.prod(leaf.shape) for leaf in moved)
    if solver is None and fits(rows, columns):
        return StoredSteps(system)
    eps = _find_eps(moved)
    default = LSMR(rtol=8 * eps, condition_limit=0.1 / eps, max_iterations=MOST_ITERATIONS)
    return IterativeSteps(system, default if solver is None else solver)


def find_scales(lengths: Lengths, weight: float) -> tuple[Any, ...]:
    """Factors that make rows of length one on average."""
    usable = [length if 0 < length < math.inf else 1.0 for length in lengths.rows]
    factor = (1.0 if weight == math.inf else weight) / (lengths.outputs or 1.0)
    return tuple(np.float32(scale) for scale in [*(1 / length for length in usable), factor])


def find_noise(system: System, moved: list[Array], given: Given, lengths: Lengths) -> float:
    """The norm of the scaled rows if all of them are rounding."""
    shapes = jax.eval_shape(system.rows, moved, given)
    counts = [sum(math.prod(leaf.shape) for leaf in block) for block in shapes]
    parts = zip(lengths.noise, given.scales[:-1], counts, strict=True)
    return math.sqrt(sum((noise * float(scale)) ** 2 * count for noise, scale, count in parts))


def measure_move(before: Sequence[Array], after: Sequence[Array]) -> float:
    """How far the parameters moved, relative to their norm."""
    old, new = jax.device_get((list(before), list(after)))
    moved = [b.astype(np.float64) - a for a, b in zip(old, new, strict=True)]
    length = math.hypot(*(float(np.linalg.norm(leaf)) for leaf in old))
    return math.hypot(*(float(np.linalg.norm(leaf)) for leaf in moved)) / (length or 1.0)


def find_rounding(leaves: Sequence[Array]) -> float:
    """What outputs that are to stay as they are may change by, relative to their size."""
    return KEPT * _find_eps(leaves)


def _find_eps(leaves: Sequence[Array]) -> float:
    return float(jnp.finfo(jnp.result_type(jnp.float32, *leaves)).eps)
