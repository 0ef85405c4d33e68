"""The argument ``reduce`` of a constraint as an object."""

from __future__ import annotations

import inspect
from typing import Any

from constrainx.constraints.reductions import Each, Mean, RootMeanSquare
from constrainx.constraints.reductions import Norm as _NormOfGroups
from constrainx.constraints.reductions import Reduction as Reduction
from constrainx.constraints.reductions import Rows as Rows
from constrainx.constraints.reductions import SlicedReduction as SlicedReduction
from constrainx.constraints.reductions import flatten as flatten
from constrainx.constraints.reductions import slices_of as slices_of
from constrainx.errors import ArgumentError, ArgumentTypeError, did_you_mean

NAMED: dict[str, Reduction] = {
    "none": Each(),
    "norm": _NormOfGroups(),
    "mean": Mean(),
    "rms": RootMeanSquare(),
}

# `_compose` asks by this name whether a reduction has slices. To be removed when it asks
# `slices_of`.
Norm = SlicedReduction


def as_reduction(reduce: Any, *, owner: str) -> Reduction:
    """Returns the reduction that a name stands for, or the object itself if it is a reduction."""
    if isinstance(reduce, str):
        if reduce not in NAMED:
            raise ArgumentError(
                f"`{owner}(reduce={reduce!r})` is not a reduction: use one of {sorted(NAMED)}, "
                f"`Norm(groups=...)` or `Sketch(rows=...)`.{did_you_mean(reduce, NAMED)}"
            )
        return NAMED[reduce]
    _check_protocol(reduce, owner)
    return reduce


def _check_protocol(reduce: Any, owner: str) -> None:
    fix = (
        f"Use one of {sorted(NAMED)}, a reduction such as `Norm(groups=...)`, or an object with a "
        "method `__call__(self, residual, *, key)` that returns a vector of rows."
    )
    if isinstance(reduce, type):
        raise ArgumentTypeError(
            f"`{owner}(reduce=...)` got the class {reduce.__name__}: call it to make a reduction. "
            f"{fix}"
        )
    if not _accepts_residual_and_key(reduce):
        raise ArgumentTypeError(f"`{owner}(reduce={reduce!r})` is not a reduction. {fix}")
    try:
        hash(reduce)
    except TypeError as error:
        raise ArgumentTypeError(
            f"`{owner}(reduce={reduce!r})` must be hashable, as a constraint is a constant under "
            "`jit`. Make it a frozen dataclass."
        ) from error


def _accepts_residual_and_key(function: Any) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None, key=None)
    except (TypeError, ValueError):
        return False
    return True
