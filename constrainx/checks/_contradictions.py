"""Constraints that no step can meet together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from constrainx.checks._geometry import Geometry
from constrainx.constraints import Member

# The share, squared, of what is asked that must be left undone to count as a contradiction.
UNDONE = 1e-4


def find_contradictions(
    members: Sequence[Member],
    geometry: Geometry,
    excess: Float[np.ndarray, " rows"],
    alive: Bool[np.ndarray, " rows"],
    owners: Int[np.ndarray, " rows"],
) -> list[tuple[str, ...]]:
    """Constraints whose own rows contradict, then pairs, then all if only all of them do.

    A set contradicts if the best step leaves noticeably more undone than for its parts by
    themselves, and more than a tolerance.

    Args:
        members: the constraints.
        geometry: of their rows.
        excess: by how much each row is violated.
        alive: which rows have a gradient.
        owners: the constraint that each row belongs to.
    """

    def rows_of(indices: Sequence[int]) -> np.ndarray:
        return np.flatnonzero(np.isin(owners, indices) & alive)

    def exceeds(indices: Sequence[int], base: float) -> tuple[bool, float]:
        rows = rows_of(indices)
        if not len(rows):
            return False, 0.0
        left = geometry.find_undone(rows)
        asked = float(np.sum((excess[rows] / geometry.lengths[rows]) ** 2))
        total = float(left @ left)
        in_units = np.abs(left) * geometry.lengths[rows]
        matters = any(
            math.sqrt(float(np.mean(in_units[owners[rows] == i] ** 2))) > members[i].tolerance
            for i in indices
            if np.any(owners[rows] == i)
        )
        return matters and total > base + UNDONE * asked, total

    alone = {index: exceeds([index], 0.0) for index in range(len(members))}
    found: list[tuple[str, ...]] = [
        (members[index].name,) for index, (is_bad, _) in alone.items() if is_bad
    ]
    base = sum(total for _, total in alone.values())
    if len(members) < 2 or not exceeds(range(len(members)), base)[0]:
        return found
    pairs: list[tuple[str, ...]] = [
        (members[i].name, members[j].name)
        for i, j in itertools.combinations(range(len(members)), 2)
        if exceeds([i, j], alone[i][1] + alone[j][1])[0]
    ]
    return [*found, *(pairs or [tuple(member.name for member in members)])]
