"""Recipes outside of the package: what they may import, and who decides that they run."""

import json
import sys

import pytest

from constrainx.recipes import find, read_recipe

RECIPE = """
import dataclasses
from typing import ClassVar
import jax.numpy as jnp, numpy as np, optax
from flax import nnx
import constrainx as cx
from constrainx.recipes import Recipe
from neighbour_of_mine import make_data

@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(Recipe):
    name: ClassVar[str] = "mine"
    steps: int = 4
    learning_rate: float = 0.1

    def trainer(self, **options):
        from pack_of_mine.losses import loss
        return cx.Trainer(
            model=nnx.Linear(2, 1, rngs=nnx.Rngs(0)),
            loss=loss,
            optimizer=optax.adam(self.learning_rate),
            data=cx.data.arrays(make_data(), batch=4),
            steps=self.steps,
            evaluation=cx.Evaluation(
                cx.data.arrays(make_data(), batch=4),
                metrics={"error": lambda model, batch: model(batch["x"]) ** 2},
            ),
            **self.settings(**options),
        )
"""
NEIGHBOUR = """
import numpy as np

def make_data():
    return {"x": np.arange(16.0, dtype=np.float32).reshape(8, 2) / 16}
"""
LOSSES = """
import jax.numpy as jnp

def loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)
"""

STOPPING = """
import functools, os, signal

@functools.cache
def stop():
    os.kill(os.getpid(), signal.SIGTERM)

def loss(model, batch):
    stop()
    return jnp.mean(model(batch["x"]) ** 2)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A recipe with a module and a package next to it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "project"
    (folder / "pack_of_mine").mkdir(parents=True)
    (folder / "mine.py").write_text(RECIPE)
    (folder / "neighbour_of_mine.py").write_text(NEIGHBOUR)
    (folder / "pack_of_mine/__init__.py").write_text("")
    (folder / "pack_of_mine/losses.py").write_text(LOSSES)
    yield folder / "mine.py"
    for name in [name for name in sys.modules if "of_mine" in name]:
        del sys.modules[name]


def read_metrics(run):
    return json.loads((run / "result.json").read_text())["metrics"]


def read_changes(run):
    return json.loads((run / "config.json").read_text()).get("changes", [])


def test_a_recipe_imports_what_is_next_to_it(constrainx, own, tmp_path):
    code, text = constrainx("train", own, "--devices", 1, "--run", "run")
    assert code == 0, text
    source = json.loads((tmp_path / "run/config.json").read_text())["source"]
    assert set(source) == {"recipe", "constrainx"}
    # Each of its files counts for the digest, also one that is imported when the trainer is built.
    found = {source["recipe"]}
    for file in ("neighbour_of_mine.py", "pack_of_mine/losses.py", "mine.py"):
        path = own.parent / file
        path.write_text(path.read_text() + "# changed\n")
        found.add(find(str(own))().config["source"]["recipe"])
    assert len(found) == 4


@pytest.mark.parametrize("command", ["eval", "resume"])
def test_a_run_executes_no_file_that_the_user_does_not_name(constrainx, own, tmp_path, command):
    # The digest in the folder is right: whoever writes the folder can see to that.
    ran = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()"
    own.write_text(f"{ran}\n{own.read_text()}")
    assert constrainx("train", own, "--devices", 1, "--run", "run")[0] == 0
    (tmp_path / "ran").unlink()
    code, text = constrainx(command, "run")
    assert code == 1
    assert f"`--recipe {own}`" in text
    assert not (tmp_path / "ran").exists()
    code, text = constrainx(command, "run", "--recipe", own, "--devices", 1)
    assert code == 0, text
    assert (tmp_path / "ran").exists()


def test_longer_training_is_the_same_as_more_steps_from_the_start(constrainx, own, tmp_path):
    train = ("train", own, "--devices", 1)
    assert constrainx(*train, "--run", "straight", "--steps", 9)[0] == 0
    assert constrainx(*train, "--run", "longer")[0] == 0
    code, text = constrainx("resume", "longer", "--recipe", own, "--devices", 1, "--steps", 9)
    assert code == 0, text
    assert read_metrics(tmp_path / "longer") == read_metrics(tmp_path / "straight")
    (change,) = read_changes(tmp_path / "longer")
    assert (change["step"], change["before"], change["after"]) == (4, {"steps": 4}, {"steps": 9})
    # The next one needs no options to go on like this.
    assert read_recipe(tmp_path / "longer", file=own).steps == 9


def test_a_run_that_a_signal_ends_says_so_in_its_result(constrainx, own, tmp_path):
    (own.parent / "pack_of_mine/losses.py").write_text(LOSSES + STOPPING)
    code, text = constrainx("train", own, "--devices", 1, "--run", "run")
    assert "To continue: constrainx resume run" in text
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["reason"], result["signal"], result["step"]) == ("asked to stop", "SIGTERM", 1)
    code, text = constrainx("resume", "run", "--recipe", own, "--devices", 1)
    assert code == 0, text
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["reason"], result["step"]) == ("finished", 4)
    assert "signal" not in result


@pytest.mark.parametrize(("options", "expected"), [((), 0), (("--fail-if-stopped",), 75)])
def test_a_scheduler_can_tell_a_stopped_run_from_one_that_has_ended(
    constrainx, own, options, expected
):
    stopping = own.parent / "pack_of_mine/losses.py"
    stopping.write_text(LOSSES + STOPPING)
    train = ("train", own, "--devices", 1, "--run", "run", "--resume-if-possible", *options)
    assert constrainx(*train)[0] == expected
    # Its function sends a signal once.
    assert constrainx(*train)[0] == 0


def test_options_that_a_recipe_does_not_pass_on_are_an_error(constrainx, own, tmp_path):
    assert constrainx("train", own, "--devices", 1, "--run", "before")[0] == 0
    own.write_text(own.read_text().replace("self.settings(**options)", "self.settings()"))
    of_run = ("before", "--recipe", own, "--devices", 1)
    for words in (
        ("train", own, "--devices", 1, "--run", "run"),
        *((command, *of_run) for command in ("resume", "eval", "certify", "doctor")),
    ):
        code, text = constrainx(*words)
        assert code == 1, words
        assert "`Mine.trainer` did not pass on 'run', so options" in text
    assert not (tmp_path / "run").exists()


def test_another_learning_rate_takes_effect_and_is_recorded(constrainx, own, tmp_path):
    assert constrainx("train", own, "--devices", 1, "--run", "run")[0] == 0
    before = read_metrics(tmp_path / "run")
    code, text = constrainx(
        "resume", "run", "--recipe", own, "--devices", 1, "--steps", 6, "--learning-rate", 0
    )
    assert code == 0, text
    assert read_metrics(tmp_path / "run") == before  # it did not move
    (change,) = read_changes(tmp_path / "run")
    assert change["before"] == {"steps": 4, "learning_rate": 0.1}


def test_a_recipe_that_moved_or_changed_continues_and_that_is_recorded(constrainx, own, tmp_path):
    assert constrainx("train", own, "--devices", 1, "--run", "run")[0] == 0
    moved = own.rename(own.with_name("renamed.py"))
    moved.write_text(moved.read_text() + "# changed\n")
    code, text = constrainx("resume", "run", "--recipe", moved, "--devices", 1, "--steps", 5)
    assert code == 0, text
    assert "continues with" in (tmp_path / "run/metrics.jsonl").read_text()
    assert "another version of recipe" in (tmp_path / "run/metrics.jsonl").read_text()
    (change,) = read_changes(tmp_path / "run")
    assert change["after"]["recipe"] == str(moved)
