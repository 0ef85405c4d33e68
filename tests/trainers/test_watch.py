"""What a run that goes wrong is told, and when it is not."""

import math
import random

import optax
import pytest

import constrainx as cx
from constrainx.trainers._watch import Watch

from .problems import Recorder, trainer, unit_hidden


def watch(logs, *, method=None, start=0, constraint=True, resolved=1.0):
    """All that is told over logs of a loss, a violation and the share that was removed."""
    member = cx.compose(lambda p: p).members[0]
    members = cx.Composed((type(member)(**{**vars(member), "name": "c", "start": start}),))
    watch = Watch(members if constraint else None, method or cx.NullSpace())
    told = []
    for i, (loss, violation, removed) in enumerate(logs):
        figures = {
            "loss": loss,
            "constraints/c/violation": violation,
            "constraints/c/resolved": resolved,
            "constraints/removed": removed,
        }
        told += watch.look(10 * (i + 1), figures)
    return told


def falling(logs):
    return [0.9**i for i in range(logs)]


def test_a_run_that_goes_well_gets_no_warning():
    assert watch((loss, 0.5 * loss, 0.3) for loss in falling(200)) == []


def test_noise_is_not_reported():
    noise = random.Random(0)
    logs = [(1 + 0.3 * noise.random(), 0.2 + 0.1 * noise.random(), 0.5) for _ in range(5000)]
    assert watch(logs) == []


def test_a_projection_that_leaves_nothing_of_the_gradient():
    told = watch([(1.0, 1e-5, 0.5)] * 3 + [(1.0, 1e-5, 0.97)] * 20)
    (sentence,) = told
    assert "has removed 97% of the gradient or more in each of the last 5 logs" in sentence
    assert "the loss at 1" in sentence
    for remedy in ('`placement="gradient"`', "a smaller `gamma`", "a later `start`", "fewer rows"):
        assert remedy in sentence


def test_a_projection_that_leaves_nothing_although_the_constraint_is_not_met():
    (sentence,) = watch((loss, 0.3, 0.95) for loss in falling(20))
    assert "with 'c' not met" in sentence
    assert watch([(loss, 0.3, 0.95) for loss in falling(4)]) == []


def test_contradicting_constraints_are_not_reported_twice():
    assert watch([(1.0, 0.3, 1.0)] * 20, resolved=0.5) == []


def test_a_run_at_the_constrained_optimum_gets_no_warning():
    # There, the gradient lies in the span of the rows.
    assert watch((loss, 1e-5, 1 - loss) for loss in falling(100)) == []


def test_advice_is_about_the_method():
    logs = [(1.0, 1.0, 0.99)] * 5
    (sentence,) = watch(logs, method=cx.NullSpace(placement="gradient"))
    assert "placement" not in sentence
    (sentence,) = watch([(1.0, 1.0, 0.0), (1e4, 1.0, 0.0)], method=cx.Penalty())
    assert "a smaller `weight`" in sentence
    assert "gamma" not in sentence
    (sentence,) = watch([(1.0, 1.0, 0.0), (1e4, 1.0, 0.0)], method=cx.Unconstrained())
    assert sentence.endswith("Try a later `start`, or a smaller learning rate")
    (sentence,) = watch([(1.0, 1.0, 0.0), (1e4, 1.0, 0.0)], constraint=False)
    assert sentence.endswith("Try a smaller learning rate")


def test_a_violation_that_stands_still_while_the_loss_grows():
    growing = [1.1**i for i in range(20)]
    (sentence,) = watch((loss, 0.5, 0.5) for loss in growing)
    assert (
        "the violation of 'c' has stood still at 0.5, far above its tolerance of 0.001" in sentence
    )
    assert "the loss grew from 1 to" in sentence
    # Near its tolerance, on its way, while the loss stays, or before the constraint acts, it may.
    assert watch((loss, 0.005, 0.5) for loss in growing) == []
    assert watch((loss, 0.5 / loss, 0.5) for loss in growing) == []
    assert watch((1.0, 0.5, 0.5) for _ in growing) == []
    assert watch([(loss, 0.5, 0.5) for loss in growing], start=1000) == []


# What a network logs that cannot meet its rows, which are drawn anew in each step, and shrinks.
COLLAPSING = [
    (7.71, 0.1095, 0.703), (7.22, 0.1113, 0.688), (7.35, 0.1093, 0.731), (7.52, 0.1035, 0.687),
    (7.74, 0.0893, 0.678), (8.89, 0.0698, 0.722), (10.6, 0.0537, 0.763), (10.7, 0.0481, 0.824),
    (9.82, 0.0514, 0.838), (9.65, 0.0497, 0.878), (11.0, 0.0436, 0.918), (11.9, 0.0362, 0.940),
]  # fmt: skip


@pytest.mark.parametrize("placement", ["twice", "update"])
def test_a_violation_that_falls_slowly_where_updates_obey_exactly(placement):
    (sentence,) = watch(COLLAPSING, method=cx.NullSpace(placement=placement))
    assert "the violation of 'c' is only down to 0.0497" in sentence
    assert "the loss grew from 7.71 to 9.65" in sentence
    assert '`placement="gradient"`' in sentence
    # In the gradient it may fall as slowly as the learning rate, at some cost.
    assert watch(COLLAPSING, method=cx.NullSpace(placement="gradient")) == []


@pytest.mark.parametrize("sign", [1, -1])
def test_a_loss_that_grows_by_orders_of_magnitude(sign):
    losses = [sign * 3.0, sign * 2.0, 500.0, 2000.0, 1e7]
    (sentence,) = watch((loss, 0.5, 0.5) for loss in losses)
    smallest = min(losses)
    assert f"the loss has grown to 2e+03, from {smallest:g} at its smallest" in sentence or (
        f"the loss has grown to 1e+07, from {smallest:g} at its smallest" in sentence
    )
    assert "learning rate" in sentence


def test_a_violation_that_grows_by_orders_of_magnitude():
    (sentence,) = watch((1.0, violation, 0.5) for violation in (0.1, 0.01, 1.0, 20.0, 1e4))
    assert "the violation of 'c' has grown to 20, from 0.01 at its smallest" in sentence


def test_growth_below_a_tolerance_or_the_first_loss_is_not_reported():
    # Below the tolerance of the constraint, and below where the loss began.
    assert watch((1.0, violation, 0.5) for violation in (1e-9, 1e-4, 0.0, 1e-2)) == []
    assert watch((loss, 1e-4, 0.5) for loss in (1.0, 1e-8, 1e-4, 1e-9, 1e-2)) == []
    assert watch((loss, 1e-4, 0.5) for loss in (0.0, 1e-8, 0.0, 1.0)) == []


def test_figures_that_are_not_finite_are_not_reported_twice():
    assert watch((loss, loss, 0.5) for loss in (1.0, math.nan, math.inf, 1.0)) == []


def test_a_run_with_a_penalty_that_diverges_gets_one_warning():
    recorder = Recorder()
    run = trainer(
        constraints=[unit_hidden(name="unit")],
        method=cx.Penalty(2.0),
        optimizer=optax.sgd(0.5),
        log_every=1,
        steps=40,
        callbacks=[recorder],
    )
    with pytest.raises(cx.UserError, match="not finite"):
        run.fit()
    told = [message for _, message in recorder.events if "diverging" in message]
    assert any("the violation of 'unit' has grown to" in message for message in told)
    assert all("a smaller `weight`" in message for message in told)
    assert len(told) == len({message.split(" has ")[0] for message in told})


def test_the_share_that_was_removed_is_logged():
    recorder = Recorder()
    trainer(constraints=[unit_hidden()], log_every=1, steps=3, callbacks=[recorder]).fit()
    shares = [figures["constraints/removed"] for figures in recorder.logged.values()]
    assert all(0 < share < 1 for share in shares)
    assert not any("removed" in message for _, message in recorder.events)
