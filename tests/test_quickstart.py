"""The quick start, shortened, and its failures."""

import json
import subprocess
import sys

import pytest

from constrainx import quickstart
from constrainx.recipes import o3_inertia


def test_runs_and_writes_what_it_says(tmp_path, monkeypatch, capsys):
    small = o3_inertia.Settings(epochs=2, examples=256, width=16, rows=16)
    monkeypatch.setattr(o3_inertia, "Settings", lambda epochs: small)
    histories = quickstart.run(epochs=2, out=tmp_path)
    assert set(histories) == {"plain", "augmentation", "null space"}
    assert all(history[-1].epoch == 2 for history in histories.values())
    assert (tmp_path / "o3-inertia.png").stat().st_size > 10_000
    figures = json.loads((tmp_path / "o3-inertia.json").read_text())
    assert figures["settings"]["width"] == 16
    text = capsys.readouterr().out
    assert "null space" in text
    assert "training time" in text


def test_the_target_is_equivariant():
    import jax

    x = jax.random.normal(jax.random.key(0), (64, 20))
    constraint = o3_inertia.constraint(o3_inertia.Settings())
    violation = constraint.violation(o3_inertia.inertia, {"x": x}, jax.random.key(1))
    assert violation < 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart", "--epochs", "0"], "at least 1"),
        (["quickstart", "--out", "/proc/nowhere"], "cannot be written to"),
        (["quikstart"], "quickstart"),
        (["quickstart", "--epoch", "3"], "--epochs"),
    ],
)
def test_wrong_commands_say_what_to_do(arguments, message):
    run = subprocess.run(
        [sys.executable, "-m", "constrainx", *arguments], capture_output=True, text=True
    )
    assert run.returncode != 0
    assert message in run.stdout + run.stderr
    assert "Traceback" not in run.stderr
