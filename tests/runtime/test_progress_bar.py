"""What the progress bar prints."""

import io

import pytest
from rich.console import Console

from constrainx.runtime import Bar, constraint_metric


def test_violations_are_shown_by_the_whole_name_of_their_constraint():
    metrics = {
        "loss": 0.5,
        constraint_metric("encoder.layers.2/mask-budget", "violation"): 0.25,
        constraint_metric("encoder.layers.2/mask-budget", "iterations"): 3.0,
        constraint_metric("O(3)", "violation"): 0.125,
        "steps_per_second": 40.0,
    }
    output = io.StringIO()
    bar = Bar(10, title="run", console=Console(file=output, width=200))
    bar.on_log(4, metrics)
    figures = "loss 0.5  encoder.layers.2/mask-budget 0.25  O(3) 0.12  40/s"
    assert output.getvalue().rstrip() == f"run: step 4/10  {figures}"


def test_only_the_first_violations_are_shown():
    output = io.StringIO()
    bar = Bar(10, console=Console(file=output, width=200))
    bar.on_log(1, {constraint_metric(name, "violation"): 1.0 for name in "abcde"})
    assert output.getvalue().rstrip() == "step 1/10  a 1  b 1  c 1"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_names_that_look_like_markup_are_shown_as_they_are(is_terminal):
    output = io.StringIO()
    console = Console(file=output, width=200, force_terminal=is_terminal, color_system=None)
    bar = Bar(10, title="a[/b]\n:smile:", console=console)
    bar.on_start(None, 0)
    bar.on_log(4, {constraint_metric("odd[/u]", "violation"): 0.25})
    bar.on_event(4, "constraint 'odd[/u]' is not met")
    bar.on_end(4, "finished")
    assert "a[/b] :smile:" in output.getvalue()
    assert "odd[/u] 0.25" in output.getvalue()
    assert "'odd[/u]' is not met" in output.getvalue()
