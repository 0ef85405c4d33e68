"""Comparisons in which every method has the same time."""

import dataclasses
import json
import time
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from constrainx import data
from constrainx.constraints import Constraint
from constrainx.recipes import (
    Comparison,
    ComparisonError,
    EqualTimeError,
    Recipe,
    _equal_time,
    all_recipes,
    steps_of,
)
from constrainx.recipes._equal_time import allocate_steps, share_time, stretch
from constrainx.recipes._sweep import check_sweeps
from constrainx.runtime import read_config
from constrainx.trainers import Evaluation, Trainer

QUIET = Console(quiet=True)


@dataclasses.dataclass(frozen=True)
class Slow(Constraint):
    """Holds always, and waits on the host for as long as a step should take."""

    wait: float = 0.0

    def residual(self, model, batch, *, key):
        def sleep(value):
            time.sleep(self.wait)
            return value

        shape = jax.ShapeDtypeStruct((), jnp.float32)
        slept = jax.pure_callback(sleep, shape, jax.lax.stop_gradient(model.bias[...][0]))
        return 0 * (model.bias[...] + slept)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waiting(Recipe):
    """Steps that take as long as a method says, from a part of the run on."""

    name: ClassVar[str] = "waiting"
    methods: ClassVar = {"quick": {"wait": 0.01}, "slow": {"wait": 0.04}}

    steps: int = 40
    wait: float = 0.01
    free: float = 0.0
    devices: int | None = 1

    def trainer(self, **options):
        x = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
        return Trainer(
            model=nnx.Linear(1, 1, rngs=nnx.Rngs(self.seed)),
            loss=lambda model, batch: jnp.mean((model(batch["x"]) - batch["x"]) ** 2),
            optimizer=optax.adam(0.1),
            data=data.arrays({"x": x}, batch=8),
            steps=self.steps,
            constraints=[Slow(wait=self.wait, start=round(self.free * self.steps))],
            method="penalty",
            evaluation=Evaluation(
                data.arrays({"x": x}, batch=8),
                metrics={"error": lambda model, batch: (model(batch["x"]) - batch["x"]) ** 2},
                every=10,
            ),
            **self.settings(**{"progress": False, **options}),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths(Recipe):
    """Never trained: only its number of steps matters."""

    name: ClassVar[str] = "lengths"

    epochs: float = 3.0
    batch: int = 32
    longer: float = 1.6
    start: int = 10

    def count(self):
        return steps_of(epochs=self.epochs * self.longer, examples=1000, batch=self.batch)

    def trainer(self, **options):
        raise NotImplementedError


class Whole(Lengths):
    """Whole epochs alone."""

    epochs: int = 3


Whole = dataclasses.dataclass(frozen=True, kw_only=True)(Whole)


def test_steps_fill_the_time():
    assert allocate_steps(60.0, 0.012) == 5000
    assert allocate_steps(1.0, 0.3) == 3
    assert allocate_steps(1.0, 7.0) == 1


@pytest.mark.parametrize("steps", [1, 7, 149, 150, 151, 4877, 123_457])
def test_a_fraction_of_an_epoch_meets_the_number_of_steps_exactly(steps):
    recipe = Lengths()
    fields, taken = stretch(recipe, steps, taken=recipe.count(), count=Lengths.count)
    assert taken == steps == recipe.but(**fields).count()
    assert set(fields) == {"epochs"}


def test_whole_epochs_come_as_near_as_they_can_and_say_so():
    recipe = Whole(longer=1.0)
    fields, taken = stretch(recipe, 200, taken=recipe.count(), count=Whole.count)
    # An epoch is 31.25 steps: 6 of them are 188, 7 are 219.
    assert fields == {"epochs": 6}
    assert taken == 188


def test_all_fields_that_are_named_stretch_by_the_same_factor():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Both(Lengths):
        stretches: ClassVar = ("epochs", "start")

    fields, _ = stretch(Both(), 450, taken=Both().count(), count=Both.count)
    assert fields["start"] == round(10 * fields["epochs"] / 3)


def test_a_recipe_without_a_length_is_told_how_to_say_it():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Endless(Lengths):
        stretches: ClassVar = ("iterations",)

    with pytest.raises(EqualTimeError, match="stretches"):
        stretch(Endless(), 10, taken=10, count=Endless.count)


def test_the_clock_sees_steps_that_become_slow_in_the_middle_and_leaves_the_trainer_alone():
    trainer = Waiting(wait=0.15, free=0.5).trainer()
    with trainer.clock_steps() as clock:
        found = clock.measure(seconds=0.2)
    # Half of the points are after the beginning.
    assert 0.075 <= found < 0.15
    assert trainer.step == 0
    assert trainer.fit().step == 40


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("compared")
    comparison = Comparison(recipe=Waiting(), out=out, seconds=0.8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_equal_time, "SECONDS_A_ROUND", 0.2)
        return comparison, comparison.run(QUIET)


def test_methods_get_steps_in_proportion_to_their_speed(compared):
    comparison, results = compared
    record = json.loads((comparison.out / "equal-time.json").read_text())
    for method, (run,) in results.items():
        share = record["methods"][method]
        assert share["steps"] == run["step"] == round(0.8 / share["step_seconds"])
        # Steps sleep, so that their time has a bound from below that no machine can be under.
        assert share["step_seconds"] >= comparison.recipe.but(method=method).wait
        assert run["seconds"] >= (run["step"] - 1) * comparison.recipe.but(method=method).wait
    assert results["quick"][0]["step"] > results["slow"][0]["step"]


def test_a_run_records_its_time_and_keeps_it_when_it_is_resumed(compared):
    comparison, results = compared
    folder = comparison.out / "slow-seed0"
    stored = read_config(folder)
    share = json.loads((comparison.out / "equal-time.json").read_text())["methods"]["slow"]
    expected = {name: share[name] for name in ("seconds", "step_seconds", "steps")}
    assert stored["equal_time"] == expected == results["slow"][0]["config"]["equal_time"]
    again = Waiting.from_config(stored).but(seed=3)
    assert again.config["equal_time"] == expected
    assert again.steps == share["steps"]


def test_a_comparison_that_continues_does_not_measure_again(compared, monkeypatch):
    comparison, results = compared

    def fail(recipes):
        raise AssertionError("measured again")

    monkeypatch.setattr(_equal_time, "time_methods", fail)
    assert dataclasses.replace(comparison).run(QUIET) == results
    with pytest.raises(EqualTimeError, match=r"--seconds 0.8.*--seconds 3"):
        dataclasses.replace(comparison, seconds=3.0).run(QUIET)
    with pytest.raises(EqualTimeError, match="--equal-time"):
        dataclasses.replace(comparison, seconds=None, equal_time=True).run(QUIET)


def test_tables_and_pictures_say_how_time_was_shared(compared):
    comparison, _ = compared
    text = (comparison.out / "compare.md").read_text()
    assert "Equal time, 0.8 s of steps for every run." in text
    assert "| quick |" in text
    for name in ("front.png", "over-time.png"):
        assert (comparison.out / name).read_bytes()[:4] == b"\x89PNG"


def test_without_a_time_it_is_that_of_the_first_method(tmp_path, monkeypatch):
    monkeypatch.setattr(_equal_time, "time_methods", lambda recipes: [r.wait for r in recipes])
    shares = share_time(Waiting(), ["slow", "quick"], tmp_path / "file.json", seconds=None)
    assert shares["slow"].seconds == pytest.approx(1.6)
    assert [shares[method].steps for method in ("slow", "quick")] == [40, 160]
    # A method that is added later gets the same time, whatever the first one is then.
    later = share_time(Waiting(), ["quick"], tmp_path / "file.json", seconds=None)
    assert later["quick"].steps == 160


def test_mistakes_are_found_before_anything_is_measured(tmp_path):
    with pytest.raises(ComparisonError, match="more than 0"):
        Comparison(recipe=Waiting(), seconds=0, out=tmp_path)
    with pytest.raises(ComparisonError, match="leave out one"):
        Comparison(recipe=Waiting(), seconds=1, equal_time=True, out=tmp_path)
    with pytest.raises(ComparisonError, match="`steps` and `seconds`"):
        Comparison(recipe=Waiting(steps=3), seconds=1, out=tmp_path)


@pytest.mark.parametrize("name", sorted(all_recipes()))
def test_every_recipe_can_be_stretched_and_swept(name):
    for size in ("smoke", "full"):
        recipe = all_recipes()[name](size=size)
        fields, _ = stretch(recipe, 1000, taken=100, count=lambda _: 1000)
        assert fields
        assert recipe.but(**fields).config != recipe.config
        check_sweeps(recipe, tuple(recipe.methods))
        assert recipe.sweeps
        assert recipe.axes
