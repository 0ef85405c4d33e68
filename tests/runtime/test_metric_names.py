"""Names of metrics, there and back."""

import pytest

from constrainx.errors import ArgumentError
from constrainx.runtime import (
    constraint_metric,
    parse_constraint_metric,
    parse_violation_metric,
    violation_metric,
)

NAMES = ["O(3)", "unit-norm-2", "encoder.layers.2/mask-budget", "a/violation", "constraints/x/y"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["violation", "met", "iterations"])
def test_a_figure_of_a_constraint_is_read_back(name, field):
    assert parse_constraint_metric(constraint_metric(name, field)) == (name, field)


@pytest.mark.parametrize("name", NAMES)
def test_a_violation_is_read_back(name):
    assert parse_violation_metric(violation_metric(name)) == name


def test_runs_that_were_recorded_before_can_be_read():
    assert constraint_metric("O(3)", "violation") == "constraints/O(3)/violation"
    assert violation_metric("O(3)") == "violation/O(3)"


@pytest.mark.parametrize(
    "metric", ["loss", "", "constraints", "constraints/", "constraints/x", "constraints//x"]
)
def test_other_metrics_are_no_figures_of_constraints(metric):
    assert parse_constraint_metric(metric) is None


@pytest.mark.parametrize("metric", ["loss", "", "violation", "violation/", "constraints/x/met"])
def test_other_metrics_are_no_violations(metric):
    assert parse_violation_metric(metric) is None


def test_a_field_with_a_slash_is_refused():
    with pytest.raises(ArgumentError, match="`field` must be a name without slashes, got 'a/b'"):
        constraint_metric("O(3)", "a/b")


@pytest.mark.parametrize("make", [violation_metric, lambda name: constraint_metric(name, "met")])
def test_an_empty_name_is_refused(make):
    with pytest.raises(ArgumentError, match="`constraint` must be the name"):
        make("")
