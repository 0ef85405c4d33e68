"""Metrics added up on the device, and their means, which the host logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from constrainx.runtime import constraint_metric, parse_constraint_metric
from constrainx.step import Report

Totals: TypeAlias = dict[str, Float[Array, ""]]

# How many steps were taken, and at how many of them a constraint was evaluated.
STEPS, EVALUATED = "steps", "evaluated"
# The figures of a report that are known only where the constraint was evaluated.
OF_EVALUATED = ("violation", "met")


def describe_reports(
    reports: Mapping[str, Report], evaluated: Mapping[str, Bool[Array, ""] | None]
) -> dict[str, Array]:
    """The reports of the constraints as metrics.

    Args:
        reports: of a step, by constraint.
        evaluated: whether each constraint was evaluated at this step; None if it always is.
    """
    metrics = {}
    for name, report in reports.items():
        is_known = evaluated.get(name)
        for field, value in report._asdict().items():
            if field == "active":
                continue
            figure = jnp.asarray(value, jnp.float32)
            if is_known is not None and field in OF_EVALUATED:
                figure = jnp.where(is_known, figure, 0)
            metrics[constraint_metric(name, field)] = figure
        if is_known is not None:
            metrics[constraint_metric(name, EVALUATED)] = is_known.astype(jnp.float32)
    return metrics


def add_totals(totals: Totals, metrics: Mapping[str, Array], is_good: Bool[Array, ""]) -> Totals:
    """Adds up the metrics of steps that were taken."""
    metrics = {STEPS: jnp.ones(()), **metrics}
    return {
        name: totals.get(name, 0.0) + jnp.where(is_good, value, 0)
        for name, value in metrics.items()
    }


def find_means(sums: Mapping[str, float]) -> dict[str, float]:
    """The mean of each metric over the steps that were taken.

    For the violation of a constraint these are the steps at which it was evaluated; without any,
    the metric is left out.
    """
    means = {}
    for name, value in sums.items():
        figure = parse_constraint_metric(name)
        if name == STEPS or (figure is not None and figure[1] == EVALUATED):
            continue
        steps = sums[STEPS]
        if figure is not None and figure[1] in OF_EVALUATED:
            steps = sums.get(constraint_metric(figure[0], EVALUATED), steps)
            if steps == 0 < sums[STEPS]:
                continue
        means[name] = value / max(steps, 1.0)
    return means
