"""The argument ``reduce`` of a constraint as an object."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from constrainx.constraints.reductions import Each, Mean, RootMeanSquare, check_residual
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


@dataclasses.dataclass(frozen=True)
class NamedReduction:
    """The reduction of a constraint: checks what comes and what goes, and names it in errors.

    Attributes:
        owner: the label of the constraint.
        base: what makes the rows.
    """

    owner: str
    base: Reduction

    def __call__(self, residual: PyTree, *, key: Array) -> Rows:
        """Returns the rows of the base."""
        check_residual(residual, owner=self.owner)
        rows = self.base(residual, key=key)
        shape, dtype = jnp.shape(rows), jnp.result_type(rows)
        if len(shape) != 1 or not shape[0] or not jnp.issubdtype(dtype, jnp.floating):
            raise ArgumentError(
                f"the reduction of {self.owner!r}, {self.base!r}, must return a floating-point "
                f"vector of rows, got shape {shape} and {dtype}. Use "
                "`cx.constraints.reductions.flatten` for a residual and `row[None]` for one number."
            )
        if self.slices is not None and shape != (1,):
            raise ArgumentError(
                f"the reduction of {self.owner!r}, {self.base!r}, has a method `slices`, so it "
                f"must make one row of each slice, got {shape[0]}."
            )
        return rows

    @property
    def slices(self) -> Callable[[PyTree], int] | None:
        """The slices of the base."""
        return slices_of(self.base)


def as_reduction(
    reduce: Any, *, owner: str, kind: Literal["equality", "inequality"] = "equality"
) -> Reduction:
    """Returns the reduction that a name or an object stands for, for constraints of this kind."""
    if isinstance(reduce, str):
        if reduce not in NAMED:
            raise ArgumentError(
                f"`{owner}(reduce={reduce!r})` is not a reduction: use one of {sorted(NAMED)}, "
                f"`Norm(groups=...)` or `Sketch(rows=...)`.{did_you_mean(reduce, NAMED)}"
            )
        reduction = NAMED[reduce]
    else:
        _check_protocol(reduce, owner)
        reduction = reduce
    if kind == "equality":
        return reduction
    for_inequality = getattr(reduction, "for_inequality", None)
    if for_inequality is None:
        raise ArgumentError(
            f"`{owner}(reduce={reduce!r})` cannot reduce an inequality: its rows may be positive "
            f"where the inequality holds. Use one of {sorted(NAMED)} or `Norm(groups=...)`; a "
            "reduction of your own needs a method `for_inequality()`, see `Reduction`."
        )
    return for_inequality()


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
