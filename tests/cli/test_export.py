"""`constrainx export`, and `cx.load` by the recipe of a run."""

import numpy as np
from safetensors.numpy import load_file

import constrainx as cx
from constrainx.runtime import StoredCheckpoints


def test_export_writes_what_is_in_the_checkpoint(constrainx, finished, tmp_path):
    path = tmp_path / "out" / "weights.safetensors"
    code, text = constrainx("export", finished, "--to", path)
    assert code == 0, text
    found = load_file(path)
    stored = StoredCheckpoints(finished / "checkpoints").read_arrays(16, "parameters.")
    assert {f"parameters.{name}" for name in found} >= set(stored)
    for name, array in stored.items():
        np.testing.assert_array_equal(found[name.removeprefix("parameters.")], array)
    code, text = constrainx("export", finished, "--to", tmp_path / "weights.pt")
    assert code == 1
    assert "must end in .safetensors" in text
    assert type(cx.load(finished, step=8)).__module__.startswith("constrainx.models")
