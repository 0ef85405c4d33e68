"""What a run leaves when it has come to its end."""

import errno
import json
import os

import pytest

from constrainx.recipes import write_result
from constrainx.recipes.periodic_regression import PeriodicRegression
from constrainx.runtime import RunError
from constrainx.trainers import Ending, Result


def test_a_picture_that_does_not_fit_on_the_disk_does_not_cost_the_result(
    tmp_path, monkeypatch, caplog
):
    def fill_the_disk(self, model, path):
        path.write_bytes(b"half a picture")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PeriodicRegression, "draw", fill_the_disk)
    monkeypatch.setattr(PeriodicRegression, "measure", lambda self, model: {"test_error": 0.5})
    result = Result(model=None, reason=Ending.FINISHED, step=8, metrics={}, seconds=1.0)
    write_result(tmp_path, PeriodicRegression(size="smoke"), result)
    assert json.loads((tmp_path / "result.json").read_text())["metrics"] == {"test_error": 0.5}
    assert not (tmp_path / "picture.png").exists()
    assert "picture.png could not be written: No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("saved", "unsaved", "said"),
    [
        (8, (), "The checkpoints are safe"),
        (4, (6, 8), "Nor could the checkpoints of steps 6, 8: .* continue from step 4"),
        (None, (6, 8), "No checkpoint was saved, either, of steps 6, 8"),
    ],
)
def test_a_result_that_does_not_fit_on_the_disk_says_what_is_safe(
    saved, unsaved, said, tmp_path, monkeypatch
):
    def fill_the_disk(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("draw", "measure"):
        monkeypatch.setattr(PeriodicRegression, name, lambda *_: {})
    monkeypatch.setattr(os, "fsync", fill_the_disk)
    result = Result(Ending.FINISHED, 8, {}, None, 1.0, None, saved, unsaved)
    with pytest.raises(RunError, match=f"No space left on device. {said}"):
        write_result(tmp_path, PeriodicRegression(size="smoke"), result)
    assert not list(tmp_path.iterdir())


def test_a_certificate_stays_with_the_result_that_it_is_about(tmp_path, monkeypatch):
    for name in ("draw", "measure"):
        monkeypatch.setattr(PeriodicRegression, name, lambda *_: {})

    def write(seconds):
        result = Result(Ending.FINISHED, 8, {}, None, seconds)
        write_result(tmp_path, PeriodicRegression(size="smoke"), result)
        return json.loads((tmp_path / "result.json").read_text())

    record = write(1.0)
    (tmp_path / "result.json").write_text(json.dumps({**record, "certificate": {"step": 8}}))
    assert write(1.0)["certificate"] == {"step": 8}
    assert "certificate" not in write(1.5)  # trained again, from an earlier checkpoint
