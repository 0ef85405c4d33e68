"""The quick start at its smallest size, and the symmetry that it shows."""

import json

import jax

from constrainx.cli._quickstart import Quickstart
from constrainx.recipes import o3_inertia


def test_quickstart_writes_a_table_and_plots(tmp_path, capsys):
    results = Quickstart(epochs=1, out=tmp_path).compare(size="smoke")
    assert set(results) == {"plain", "augmentation", "nullspace"}
    assert (tmp_path / "report/violation.png").stat().st_size > 5_000
    record = json.loads((tmp_path / "compare.json").read_text())
    assert record["results"]["plain"][0]["config"]["width"] == 16
    text = capsys.readouterr().out
    assert "nullspace" in text
    assert "violation" in text


def test_the_target_is_equivariant():
    x = jax.random.normal(jax.random.key(0), (64, 20))
    constraint = o3_inertia.O3Inertia().constraint()
    violation = constraint.violation(o3_inertia.inertia, {"constrained": x}, jax.random.key(1))
    assert violation < 1e-6
