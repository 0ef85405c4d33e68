"""The names under which the figures of a constraint are logged, and how to read them back.

A constraint's name may hold slashes, as in ``encoder.layers.2/mask-budget``; the field of a figure
may not, and so the last part of a metric's name is always the field.
"""

from __future__ import annotations

from constrainx.errors import ArgumentError

# The share of the gradient's squared norm that the constraints have projected out.
REMOVED = "constraints/removed"
# The part of the update's length that a trust region left.
TRUSTED = "constraints/trusted"
_FIGURE = "constraints/"
_VIOLATION = "violation/"
_RELATIVE = "relative/"


def constraint_metric(constraint: str, field: str) -> str:
    """The metric that a training step logs for one field of a constraint's report.

    >>> constraint_metric("encoder.layers.2/mask-budget", "iterations")
    'constraints/encoder.layers.2/mask-budget/iterations'

    Args:
        constraint: its name.
        field: a field of `constrainx.step.Report`, such as ``"violation"``.
    """
    if not constraint:
        raise ArgumentError("`constraint` must be the name of a constraint, got an empty string.")
    if not field or "/" in field:
        raise ArgumentError(f"`field` must be a name without slashes, got {field!r}.")
    return f"{_FIGURE}{constraint}/{field}"


def violation_metric(constraint: str) -> str:
    """The metric that an evaluation records for a constraint's violation on held-out data.

    >>> violation_metric("O(3)")
    'violation/O(3)'

    Args:
        constraint: its name.
    """
    if not constraint:
        raise ArgumentError("`constraint` must be the name of a constraint, got an empty string.")
    return f"{_VIOLATION}{constraint}"


def parse_constraint_metric(metric: str) -> tuple[str, str] | None:
    """The constraint and the field that `constraint_metric` was given; None for other metrics.

    >>> parse_constraint_metric("constraints/encoder.layers.2/mask-budget/violation")
    ('encoder.layers.2/mask-budget', 'violation')
    >>> parse_constraint_metric("loss")
    """
    constraint, _, field = metric.removeprefix(_FIGURE).rpartition("/")
    return (constraint, field) if metric.startswith(_FIGURE) and constraint and field else None


def parse_violation_metric(metric: str) -> str | None:
    """The constraint that `violation_metric` was given; None for other metrics.

    >>> parse_violation_metric("violation/encoder.layers.2/mask-budget")
    'encoder.layers.2/mask-budget'
    """
    constraint = metric.removeprefix(_VIOLATION)
    return constraint if metric.startswith(_VIOLATION) and constraint else None


def relative_metric(constraint: str) -> str:
    """The metric that an evaluation records for that violation in units of its scale.

    >>> relative_metric("O(3)")
    'relative/O(3)'

    Args:
        constraint: its name.
    """
    if not constraint:
        raise ArgumentError("`constraint` must be the name of a constraint, got an empty string.")
    return f"{_RELATIVE}{constraint}"


def parse_relative_metric(metric: str) -> str | None:
    """The constraint that `relative_metric` was given; None for other metrics.

    >>> parse_relative_metric("relative/encoder.layers.2/mask-budget")
    'encoder.layers.2/mask-budget'
    """
    constraint = metric.removeprefix(_RELATIVE)
    return constraint if metric.startswith(_RELATIVE) and constraint else None
