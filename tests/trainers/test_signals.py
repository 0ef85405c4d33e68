"""Signals: a run saves and ends, whatever it waits for, and so does the program around it."""

import contextlib
import os
import signal
import threading
import time

import pytest

import constrainx as cx

from .problems import Recorder, arrays, assert_same_state, trainer


def stalled(after):
    """Batches that stop coming after some steps, for good."""

    def make():
        for step, batch in enumerate(arrays().from_step(0)):
            if step == after:
                threading.Event().wait()
            yield batch

    return cx.data.from_iterable(make, batch=8)


@contextlib.contextmanager
def sent(*numbers, when, between=0.3):
    """Sends signals to this process, one after the other, once a condition holds."""

    def send():
        while not when():
            time.sleep(0.01)
        for number in numbers:
            time.sleep(between)
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        sender.join()


def has_logged(recorder, step):
    return lambda: step in recorder.logged


@pytest.mark.parametrize(
    ("number", "ends_with"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_ends_the_wait_for_data_that_has_stalled(tmp_path, number, ends_with):
    recorder = Recorder()
    options = {"steps": 6, "log_every": 1, "run": tmp_path / "run"}
    waiting = trainer(data=stalled(after=3), callbacks=[recorder], **options)
    with sent(number, when=has_logged(recorder, 3)), pytest.raises(ends_with) as raised:
        waiting.fit()
    assert getattr(raised.value, "code", 0) == 0
    assert recorder.ended == [(3, f"asked to stop by {number.name}")]
    assert (waiting.result.reason, waiting.result.signal) == ("asked to stop", number.name)
    resumed = trainer(**options)
    assert resumed.restore() == 3
    resumed.fit()
    whole = trainer(steps=6)
    whole.fit()
    assert_same_state(resumed.state, whole.state)


def test_a_signal_ends_an_evaluation_whose_data_has_stalled(tmp_path, monkeypatch):
    monkeypatch.setattr("constrainx.trainers._loop.PATIENCE", 0.5)
    recorder = Recorder()
    options = {"steps": 6, "log_every": 1, "run": tmp_path / "run"}
    waiting = trainer(
        evaluation=stalled(after=1), evaluate_every=2, callbacks=[recorder], **options
    )
    with sent(signal.SIGTERM, when=has_logged(recorder, 2)), pytest.raises(SystemExit):
        waiting.fit()
    assert recorder.saved == [2]
    assert recorder.evaluated == {}
    assert any("evaluation was given up" in message for _, message in recorder.events)


def test_a_second_ctrl_c_ends_even_a_run_that_cannot_save():
    class Holds(Recorder):
        def on_log(self, step, metrics):
            super().on_log(step, metrics)
            threading.Event().wait()

    recorder = Holds()
    holding = trainer(data=stalled(after=3), steps=6, log_every=1, callbacks=[recorder])
    signals = (signal.SIGINT, signal.SIGINT)
    with sent(*signals, when=has_logged(recorder, 1)), pytest.raises(KeyboardInterrupt):
        holding.fit()
    assert recorder.ended == [(1, "failed")]
    assert holding.result is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_loop_over_seeds(number):
    class Asks(Recorder):
        def on_log(self, step, metrics):
            super().on_log(step, metrics)
            os.kill(os.getpid(), number)

    asking, begun = Asks(), []

    def fit_all(**options):
        for seed in range(3):
            begun.append(seed)
            run = trainer(seed=seed, log_every=1, callbacks=[asking])
            last = run.fit(**options)
        return last

    with pytest.raises((SystemExit, KeyboardInterrupt)) as raised:
        fit_all()
    assert begun == [0]
    # Without a folder nothing was saved, and the exit code says so.
    assert getattr(raised.value, "code", 143) == 143
    assert fit_all(on_signal="return").reason == "asked to stop"
    assert begun == [0, 0, 1, 2]
