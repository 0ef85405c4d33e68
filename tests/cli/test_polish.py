"""`constrainx polish`, and the model that it leaves in the run's folder."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

import constrainx as cx


def test_polish_of_a_finished_run(constrainx, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    before = sorted(path.name for path in run.rglob("*"))
    code, text = constrainx(
        "polish", run, "--devices", 1, "--weight", 1, "--max-steps", 3, "--tolerance", 1e-6
    )
    assert (run / "polished.json").exists(), text
    record = json.loads((run / "polished.json").read_text())
    assert code == (0 if record["met"] else 1), text
    assert "before, on held-out data" in text
    assert record["step"] == 16
    (found,) = record["constraints"]
    # Each of 32 examples has nine residuals.
    assert (found["name"], found["rows"]) == ("O(3)", 288)
    assert found["after"] < 0.1 * found["before"]
    assert record["after"]["error"] == pytest.approx(record["before"]["error"], rel=0.5)
    after = sorted(path.name for path in run.rglob("*"))
    assert sorted({*after} - {*before}) == ["polished.json", "polished.safetensors"]

    trained, polished = cx.load(run), cx.load(run, polished=True)
    states = [jax.tree.leaves(nnx.state(model, nnx.Param)) for model in (trained, polished)]
    moved = [np.linalg.norm(np.asarray(b) - np.asarray(a)) for a, b in zip(*states, strict=True)]
    lengths = [np.linalg.norm(np.asarray(a)) for a in states[0]]
    assert np.linalg.norm(moved) / np.linalg.norm(lengths) == pytest.approx(
        record["moved"], rel=1e-4
    )


def test_a_run_that_was_not_polished_says_how(finished):
    with pytest.raises(cx.CheckpointError, match="constrainx polish"):
        cx.load(finished, polished=True)
