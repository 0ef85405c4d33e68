"""The quick start, shortened, and what it is about."""

import json

import jax

from constrainx.cli import _quickstart as quickstart
from constrainx.recipes import find, o3_inertia


def test_runs_and_writes_what_it_says(tmp_path, capsys):
    results = quickstart.run(epochs=1, out=tmp_path, size="smoke")
    assert set(results) == {"plain", "augmentation", "nullspace"}
    assert (tmp_path / "report/violation.png").stat().st_size > 5_000
    record = json.loads((tmp_path / "compare.json").read_text())
    assert record["results"]["plain"][0]["config"]["width"] == 16
    text = capsys.readouterr().out
    assert "nullspace" in text
    assert "violation" in text


def test_the_target_is_equivariant():
    x = jax.random.normal(jax.random.key(0), (64, 20))
    constraint = find("o3-inertia")().constraint()
    violation = constraint.violation(o3_inertia.inertia, {"constrained": x}, jax.random.key(1))
    assert violation < 1e-6
