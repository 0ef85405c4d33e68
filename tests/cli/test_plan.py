"""`constrainx plan`, and `constrainx train --profile`."""

import importlib.util
import json

import pytest

from constrainx.plan import _mesh as mesh

RECIPE = ("o3-inertia", "--size", "smoke")


def test_a_plan_is_printed(constrainx):
    code, text = constrainx("plan", *RECIPE, "--target", "cpu", "--devices", 2, "--batch", 64)
    assert code == 0, text
    assert "2 × simulated devices, data 2 × fsdp 1" in text
    for name in ("64, 32 a device", "parameters", "peak memory", "the constraints add", "compiled"):
        assert name in text


def test_a_plan_is_json(constrainx):
    words = ("--target", "cpu", "--devices", 4, "--mesh", "fsdp=2", "--method", "plain", "--json")
    code, text = constrainx("plan", *RECIPE, *words)
    assert code == 0, text
    found = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    assert found["mesh"] == {"data": 2, "fsdp": 2}
    assert (found["recipe"], found["method"]) == ("o3-inertia", "plain")
    assert found["memory"]["peak"] >= found["state_held"]
    assert found["added"]["arrays"] == []


@pytest.mark.skipif(
    any(map(importlib.util.find_spec, mesh.COMPILERS)), reason="the compiler for GPUs is there"
)
def test_without_a_compiler_for_gpus_it_says_what_to_install(constrainx):
    code, text = constrainx("plan", *RECIPE, "--target", "h100")
    assert code == 1
    assert text.count("\n") == 1
    assert "pip install 'constrainx[plan]'" in text


def test_more_devices_than_can_be_simulated_now(constrainx, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    code, text = constrainx("plan", *RECIPE, "--target", "cpu", "--devices", 64)
    assert code == 1
    assert "JAX has started with 8 devices" in text


def test_steps_of_a_run_are_traced(constrainx, tmp_path):
    code, text = constrainx("train", *RECIPE, "--devices", 1, "--profile", "2", "--run", "run")
    assert code == 0, text
    assert [*(tmp_path / "run" / "profile").glob("plugins/profile/*/perfetto_trace.json.gz")]
    assert "traced steps 2 to 2" in (tmp_path / "run" / "metrics.jsonl").read_text()
