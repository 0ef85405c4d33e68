"""`constrainx soak` with real processes, and that it notices what it looks for."""

import json
import subprocess
import time

import numpy as np
import pytest

from constrainx.recipes import _soak as soaking
from constrainx.recipes.periodic_regression import PeriodicRegression


def test_a_run_that_is_killed_and_resumed_ends_where_it_would_have(tmp_path):
    recipe = PeriodicRegression(size="smoke", steps=12, save_every=2)
    (found,) = soaking.soak(
        recipe, kills=1, folder=tmp_path / "soak", chance=1, layouts=["same device"]
    )
    assert (found.kills, found.steps) == (1, 12)
    assert (found.lost, found.difference, found.undisturbed) == (0, 0.0, 0.0)
    runs = sorted(path.name for path in (tmp_path / "soak").iterdir())
    assert runs == ["killed-0", "straight-on-1"]


def test_what_is_read_of_a_run_that_was_killed(tmp_path):
    lines = [{"step": 0, "kind": "event", "message": "resumed from step 0"}]
    lines += [{"step": step, "kind": "train"} for step in (1, 2, 3)]
    lines += [{"step": 2, "kind": "event", "message": "resumed from step 2; set aside"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 3, "kin')
    for name in ("2", "10", "12.orbax-checkpoint-tmp", "set-aside"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert soaking._read_step(tmp_path) == 3
    assert soaking._read_resumes(tmp_path) == [0, 2]
    assert soaking._find_saved(tmp_path) == 10
    assert soaking._compare([np.zeros(2), np.ones(0)], [np.array([0, -3.0]), np.ones(0)]) == 3


def test_a_run_that_fails_by_itself_is_an_error(tmp_path):
    child = subprocess.Popen(["false"])
    with pytest.raises(soaking.SoakError, match=r"exit code 1: see .*output\.txt"):
        soaking._wait_for_end(tmp_path, [child])


def test_an_early_kill_does_not_wait_beyond_the_first_step(tmp_path, monkeypatch):
    steps = iter([8, 8, 9])
    monkeypatch.setattr(soaking, "_read_step", lambda run: next(steps))
    began = time.monotonic()
    soaking._wait_for_next_step(tmp_path, [], 60.0)
    assert time.monotonic() - began < 10
    monkeypatch.setattr(soaking, "_read_step", lambda run: 0)
    soaking._wait_for_next_step(tmp_path, [], 0.01)
