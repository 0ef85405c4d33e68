"""Constraints with a smooth row for each entry of their residuals."""

from __future__ import annotations

import dataclasses

from constrainx.constraints._compose import Composed, Member, _of_constraint
from constrainx.constraints._reduce import NamedReduction
from constrainx.constraints.reductions import Clipped, Each, Norm, RootMeanSquare, Sketch

# What these make of a residual is zero only where all of the residual is, except a sketch, which
# may be zero elsewhere as well.
ROUGH = (Norm, RootMeanSquare, Sketch)


def smooth_rows(composed: Composed) -> Composed:
    """The same constraints with residuals for rows, where their rows are norms or sketches.

    A norm has a kink at zero, so that Gauss-Newton does not converge quadratically on it. Means
    stay, because a mean may be zero where the residuals are not, and so does a reduction of a
    user's own.
    """
    return Composed(tuple(_smooth(member) for member in composed))


def _smooth(member: Member) -> Member:
    found = member.attached
    if found is None or not isinstance(_find_base(found.constraint.reduction), ROUGH):
        return member
    smooth = dataclasses.replace(found.constraint, reduce=Each())
    renewed = _of_constraint(found._replace(constraint=smooth), member.model)
    return dataclasses.replace(renewed, name=member.name)


def _find_base(reduction: object) -> object:
    """The reduction that a name for errors, or the clipping of an inequality, is put around."""
    while isinstance(reduction, NamedReduction | Clipped):
        reduction = reduction.base
    return reduction
