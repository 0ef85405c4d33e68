"""What may change when a run continues, and what may not."""

import json
import shutil
import sys
import types

import pytest

from constrainx.cli._run_trainer import tell_unsaved
from constrainx.recipes import read_recipe
from constrainx.recipes.periodic_regression import PeriodicRegression
from constrainx.runtime import CheckpointError, prepare_run_folder


@pytest.fixture
def interrupted(finished, tmp_path):
    """A run of 16 steps that has only the checkpoint of step 8."""
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "16")
    (run / "result.json").unlink()
    return run


def steps_logged(run):
    """The steps that were logged since the run was last resumed."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    begin = max(i for i, line in enumerate(lines) if "resumed from" in str(line.get("message")))
    return [line["step"] for line in lines[begin:] if line["kind"] == "train"]


def test_resume_of_a_finished_run_changes_nothing(constrainx, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    before = json.loads((run / "result.json").read_text())["metrics"]
    code, _ = constrainx("resume", run, "--devices", 1)
    assert code == 0
    assert json.loads((run / "result.json").read_text())["metrics"] == before


def test_resume_may_log_and_save_differently(constrainx, finished, interrupted):
    code, text = constrainx(
        "resume", interrupted, "--devices", 1, "--log-every", 2, "--save-every", 3,
        "--keep.last", 9, "--on-nonfinite", "skip", "--on-save-error", "continue",
    )  # fmt: skip
    assert code == 0, text
    assert steps_logged(interrupted) == [10, 12, 14, 16]
    saved = sorted(int(path.name) for path in (interrupted / "checkpoints").glob("[0-9]*"))
    assert saved == [8, 9, 12, 15, 16]
    # The same numbers come out, and the change is on record.
    results = [json.loads((run / "result.json").read_text()) for run in (finished, interrupted)]
    assert results[0]["metrics"] == results[1]["metrics"]
    assert results[1]["config"]["save_every"] == 3
    config = json.loads((interrupted / "config.json").read_text())
    assert config["save_every"] == 3
    (change,) = config["changes"]
    assert change["step"] == 8
    assert change["before"]["save_every"] == 8
    assert change["after"]["keep"]["last"] == 9
    events = (interrupted / "metrics.jsonl").read_text()
    assert "continues with log_every 2 (was 4), save_every 3 (was 8)" in events


def test_resume_takes_the_values_of_the_run_if_none_are_given(constrainx, interrupted):
    code, text = constrainx("resume", interrupted, "--help")
    assert code == 0
    assert "(default: 8)" in text
    code, _ = constrainx("resume", interrupted, "--devices", 1)
    assert code == 0
    assert steps_logged(interrupted) == [12, 16]
    assert "continues with" not in (interrupted / "metrics.jsonl").read_text()


def test_resume_runs_on_other_devices(constrainx, interrupted):
    code, text = constrainx("resume", interrupted, "--devices", 4, "--fsdp", 2)
    assert code == 0
    assert "4 × cpu, data 2 × fsdp 2" in text


@pytest.mark.parametrize("option", ["--width", "--seed", "--examples", "--method"])
def test_resume_refuses_options_that_shape_the_network_or_the_data(constrainx, interrupted, option):
    code, text = constrainx("resume", interrupted, option, 8)
    assert code == 1
    assert f"has no option `{option}`" in text


def test_fewer_steps_than_were_taken_are_refused(constrainx, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    code, text = constrainx("resume", run, "--devices", 1, "--epochs", 1)
    assert code == 1
    assert "fewer than the 16 steps that have been taken" in text
    assert "changes" not in (run / "config.json").read_text()


def test_resume_sends_metrics_to_weights_and_biases(constrainx, interrupted, monkeypatch):
    sent = []

    class Run:
        summary: dict = {}  # noqa: RUF012

        def log(self, figures, step):
            sent.append(step)

        def finish(self):
            sent.append("finish")

    fake = types.ModuleType("wandb")
    fake.init = lambda **options: sent.append(options["project"]) or Run()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    code, text = constrainx("resume", interrupted, "--devices", 1, "--wandb")
    assert code == 0, text
    assert sent[0] == "o3-inertia"
    assert {12, 16} <= set(sent[1:-1])
    assert sent[-1] == "finish"


def test_resume_joins_other_processes(constrainx, interrupted):
    code, text = constrainx("resume", interrupted, "--distributed", "here")
    assert code == 1
    assert "HOST:PORT,PROCESSES,INDEX" in text


def test_a_run_without_a_recipe_says_so(constrainx, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_text("{}")
    code, text = constrainx("resume", "bare")
    assert code == 1
    assert "was not started from a recipe" in text


def test_train_resumes_if_possible(constrainx, finished, interrupted, tmp_path):
    options = ("--size", "smoke", "--devices", 1, "--save-every", 8, "--log-every", 4)
    fresh = shutil.copytree(interrupted, tmp_path / "fresh")
    # Killed between the config and the first checkpoint.
    shutil.rmtree(fresh / "checkpoints")
    for run in (interrupted, fresh):
        code, text = constrainx("train", "o3-inertia", "--run", run, *options)
        assert code == 1
        assert "holds a run already" in text
        code, text = constrainx(
            "train", "o3-inertia", "--run", run, *options, "--resume-if-possible"
        )  # fmt: skip
        assert code == 0, text
        wanted, found = (json.loads((one / "result.json").read_text()) for one in (finished, run))
        assert found["metrics"] == wanted["metrics"]
    assert "resumed from step 8" in (interrupted / "metrics.jsonl").read_text()


def test_a_config_that_was_edited_is_refused(constrainx, interrupted):
    path = interrupted / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    code, text = constrainx("resume", interrupted, "--devices", 1)
    assert code == 1
    assert "seed was 0, now 1" in text
    code, text = constrainx("eval", interrupted, "--devices", 1)
    assert code == 0
    assert "saved with other settings: seed was 0, now 1" in text


def test_checkpoints_that_were_not_saved_are_named_and_end_with_an_error(finished):
    result = types.SimpleNamespace(
        reason="finished", step=16, metrics={}, seconds=1.0, signal=None, saved=8, unsaved=(12, 16)
    )
    with pytest.raises(CheckpointError, match=r"steps 12, 16 could not be written.*step 8"):
        tell_unsaved(finished, result)


@pytest.mark.parametrize("source", ["edited", None, 5])
def test_a_source_that_is_no_digest_is_ignored(source, tmp_path):
    recipe = PeriodicRegression(size="smoke")
    (tmp_path / "config.json").write_text(json.dumps({**recipe.config, "source": source}))
    assert read_recipe(tmp_path) == recipe


def test_changes_are_recorded_beside_whatever_is_there(tmp_path):
    prepare_run_folder(tmp_path, {"rate": 1})
    (tmp_path / "config.json").write_text('{"rate": 1, "changes": 5}')
    prepare_run_folder(tmp_path, {"rate": 2}, resume_from=3, may_change=["rate"])
    edited, noted = json.loads((tmp_path / "config.json").read_text())["changes"]
    assert (edited, noted["step"], noted["after"]) == (5, 3, {"rate": 2})
