"""What a run leaves when it has come to its end."""

import errno
import json
import os

from constrainx.recipes import write_result
from constrainx.recipes.periodic_regression import PeriodicRegression
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
