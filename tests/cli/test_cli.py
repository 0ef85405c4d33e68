"""The commands, on real recipes at their smallest size."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from constrainx.recipes import all_recipes

SMOKE = ("--size", "smoke", "--devices", "1")


def test_list_names_every_recipe(constrainx):
    code, text = constrainx("list")
    assert code == 0
    for name, recipe in all_recipes().items():
        assert name in text
        assert next(iter(recipe.methods)) in text


@pytest.mark.parametrize("name", all_recipes())
def test_train_then_resume(constrainx, tmp_path, name):
    run = tmp_path / "mine"
    code, text = constrainx("train", name, *SMOKE, "--run", run, "--save-every", 2)
    assert code == 0
    assert "finished at step" in text
    config = json.loads((run / "config.json").read_text())
    assert config["save_every"] == 2
    assert config["size"] == "smoke"
    environment = json.loads((run / "environment.json").read_text())
    assert environment["jax"] == jax.__version__
    assert any((run / "tensorboard").iterdir())
    result = json.loads((run / "result.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["learning_rate"] >= 0 for line in lines if line["kind"] == "train")
    recipe = all_recipes()[name]
    assert {*recipe.figures, *recipe.axes} <= set(result["metrics"])

    # A run that lost its last checkpoint continues from the one before, to the same result.
    *_, before, last = sorted(int(path.name) for path in (run / "checkpoints").glob("[0-9]*"))
    assert last == result["step"]
    shutil.rmtree(run / "checkpoints" / str(last))
    (run / "result.json").unlink()
    code, text = constrainx("resume", run, "--devices", 1)
    assert code == 0
    assert f"resumed from step {before}" in text
    assert json.loads((run / "result.json").read_text())["metrics"] == result["metrics"]


def test_eval_measures_a_checkpoint(constrainx, finished):
    code, text = constrainx("eval", finished, "--devices", 1)
    assert code == 0
    result = json.loads((finished / "result.json").read_text())
    assert f"{result['metrics']['error']:.4g}" in text


def test_the_default_folder_is_not_overwritten(constrainx, tmp_path):
    arguments = ("train", "o3-inertia", *SMOKE, "--method", "plain", "--epochs", 1)
    assert constrainx(*arguments)[0] == 0
    assert (tmp_path / "runs/o3-inertia/plain-seed0/result.json").exists()
    code, text = constrainx(*arguments)
    assert code == 1
    assert "holds a run already" in text
    assert "constrainx resume" in text


def test_compare_writes_a_table_and_does_not_repeat_runs(constrainx, tmp_path):
    arguments = ["compare", "o3-inertia", *SMOKE, "--epochs", 1, "--seeds", 2]
    arguments += ["--methods", "plain", "augmentation"]
    code, text = constrainx(*arguments)
    assert code == 0
    out = tmp_path / "runs/compare/o3-inertia-smoke"
    record = json.loads((out / "compare.json").read_text())
    assert [len(found) for found in record["results"].values()] == [2, 2]
    errors = [found["metrics"]["error"] for found in record["results"]["plain"]]
    assert errors[0] != errors[1]
    assert f"{sum(errors) / 2:.3g}" in text
    table = (out / "compare.md").read_text()
    assert "0.13 ± 0.01" in table  # the paper's figure, beside ours
    assert (out / "report/report.html").exists()
    stamp = (out / "plain-seed0/result.json").stat().st_mtime_ns
    assert constrainx(*arguments)[0] == 0
    assert (out / "plain-seed0/result.json").stat().st_mtime_ns == stamp
    code, text = constrainx(*arguments, "--width", 8)
    assert code == 1
    assert "other settings" in text


def test_report_draws_a_run(constrainx, finished, tmp_path):
    code, text = constrainx("report", finished, "--out", tmp_path / "report")
    assert code == 0
    assert "report.html" in text
    for name in ("loss", "violation", "time"):
        assert (tmp_path / f"report/{name}.png").stat().st_size > 5000


def test_a_copy_of_a_recipe_can_be_trained(constrainx, tmp_path):
    assert constrainx("cp", "o3-inertia", "mine.py")[0] == 0
    code, text = constrainx("cp", "o3-inertia", "mine.py")
    assert code == 1
    assert "exists already" in text
    source = (tmp_path / "mine.py").read_text().replace('"o3-inertia"', '"my-inertia"')
    (tmp_path / "mine.py").write_text(source)
    code, text = constrainx("train", "mine.py", *SMOKE, "--epochs", 1, "--method", "plain")
    assert code == 0
    config = json.loads((tmp_path / "runs/my-inertia/plain-seed0/config.json").read_text())
    assert config["recipe"] == str(tmp_path / "mine.py")
    arguments = ("eval", "runs/my-inertia/plain-seed0", "--devices", 1)
    assert constrainx(*arguments)[0] == 1
    assert constrainx(*arguments, "--recipe", "mine.py")[0] == 0


@pytest.mark.parametrize("file", ["sine_net.py", "2 Odd-things.py"])
def test_a_new_recipe_can_be_trained(constrainx, tmp_path, file):
    code, text = constrainx("new", file)
    assert code == 0
    assert f"constrainx train {file}" in text
    assert constrainx("new", file)[0] == 1
    code, text = constrainx("train", file, *SMOKE, "--run", "run")
    assert code == 0, text
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert {"error", "violation/odd"} <= set(result["metrics"])
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if row["kind"] == "train"]
    # Of a cosine over 20 steps from 0.01: the means over steps 0 to 9 and 10 to 19.
    rates = 0.005 * (1 + np.cos(np.pi * np.arange(20) / 20))
    assert [row["learning_rate"] for row in logged] == pytest.approx(
        [rates[:10].mean(), rates[10:].mean()], rel=1e-4
    )
    assert all(row["gradient_norm"] > 0 for row in logged)


@pytest.mark.parametrize(("file", "message"), [("mine", "mine.py"), ("no/mine.py", "No such file")])
def test_a_new_recipe_that_cannot_be_written_is_one_sentence(constrainx, file, message):
    code, text = constrainx("new", file)
    assert code == 1
    assert message in text


@pytest.mark.parametrize("method", all_recipes()["o3-inertia"].methods)
def test_validate_builds_every_method(constrainx, method):
    code, text = constrainx("validate", "o3-inertia", *SMOKE, "--method", method)
    assert code == 0
    assert "One step was traced" in text


def test_fast_dev_run_leaves_nothing_behind(constrainx, tmp_path):
    code, text = constrainx("train", "o3-inertia", *SMOKE, "--fast-dev-run")
    assert code == 0
    assert "two steps ran" in text
    assert not (tmp_path / "runs").exists()


def test_the_program_trains_in_a_process_of_its_own(tmp_path):
    """In a process of its own, with the compilation cache on."""
    passed_on = ("JAX_PLATFORMS", "XLA_FLAGS", "PYTHONPATH")
    environment = {name: os.environ[name] for name in passed_on if name in os.environ}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-m", "constrainx", "train", "o3-inertia", *SMOKE, "--epochs", "1"]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **environment},
    )
    assert run.returncode == 0, run.stderr
    assert "Gram matrix" in run.stderr
    assert list(pathlib.Path(tmp_path / "cache/constrainx/xla").iterdir())
