"""The table of a comparison, and what happens when one is started again."""

import dataclasses
import json
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from constrainx import data
from constrainx.recipes import (
    Comparison,
    ComparisonError,
    Recipe,
    RecipeError,
    _recipe,
    build_trainer,
)
from constrainx.recipes._source import digest_source
from constrainx.runtime import Callback
from constrainx.trainers import Evaluation, Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line(Recipe):
    """Fits a line in a few steps."""

    name: ClassVar[str] = "line"
    methods: ClassVar = {"fast": {"rate": 0.2}, "slow": {"rate": 0.1}, "idle": {"rate": 0.0}}
    compared: ClassVar = ("fast", "slow")

    rate: float = 0.0
    devices: int | None = 1

    def trainer(self, **options):
        x = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
        return Trainer(
            model=nnx.Linear(1, 1, rngs=nnx.Rngs(self.seed)),
            loss=lambda model, batch: jnp.mean((model(batch["x"]) - batch["x"]) ** 2),
            optimizer=optax.sgd(self.rate),
            data=data.arrays({"x": x}, batch=4),
            steps=4,
            evaluation=Evaluation(
                data.arrays({"x": x}, batch=4),
                metrics={"error": lambda model, batch: jnp.abs(model(batch["x"]) - batch["x"])},
            ),
            **self.settings(**{"progress": False, **options}),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Awkward(Line):
    """Names that rich and Markdown would misread."""

    name: ClassVar[str] = "a [/b]\nb"
    methods: ClassVar = {"[red]|x": {}, ":smile:\n": {}}
    compared: ClassVar = ()
    figures: ClassVar = {"error": "[link]error[/link]"}


def make_results(methods):
    return {method: [{"metrics": {"error": 0.5}, "seconds": 1.0}] for method in methods}


def draw(grids):
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        for grid in grids:
            console.print(grid.draw())
    return captured.get()


def test_markup_in_names_is_shown_as_it_is(tmp_path):
    comparison = Comparison(recipe=Awkward(), out=tmp_path)
    text = draw(comparison.tabulate(make_results(Awkward.methods)))
    for word in ("a [/b] b, size full", "[red]|x", ":smile:", "[link]error[/link]"):
        assert word in text


def test_a_markdown_table_keeps_its_shape(tmp_path):
    comparison = Comparison(recipe=Awkward(), out=tmp_path)
    (grid,) = comparison.tabulate(make_results(Awkward.methods))
    _, _, *lines = grid.write().splitlines()
    assert len(lines) == 4
    assert all(line.replace("\\|", "").count("|") == 4 for line in lines)


def test_the_recipe_says_what_is_compared_and_all_metrics_are_shown_by_default(tmp_path):
    comparison = Comparison(recipe=Line(), seeds=2, out=tmp_path)
    results = comparison.run(Console(quiet=True))
    assert {method: len(runs) for method, runs in results.items()} == {"fast": 2, "slow": 2}
    rates = [[run["config"]["rate"] for run in runs] for runs in results.values()]
    assert rates == [[0.2, 0.2], [0.1, 0.1]]
    assert "| method | error | time |" in (tmp_path / "compare.md").read_text()
    assert json.loads((tmp_path / "compare.json").read_text())["results"] == results


def test_fields_given_by_hand_win_over_every_method(tmp_path):
    comparison = Comparison(recipe=Line(rate=0.3), out=tmp_path)
    results = comparison.run(Console(quiet=True))
    assert [runs[0]["config"]["rate"] for runs in results.values()] == [0.3, 0.3]


def test_results_are_found_again_unless_they_are_of_other_settings(tmp_path):
    first = Comparison(recipe=Line(), out=tmp_path).run(Console(quiet=True))
    # How often a run was saved does not matter for its result.
    again = Comparison(recipe=Line(save_every=2), out=tmp_path).run(Console(quiet=True))
    assert again == first
    with pytest.raises(ComparisonError, match="other settings"):
        Comparison(recipe=Line(rate=0.3), out=tmp_path).run(Console(quiet=True))


def test_an_interrupted_run_may_continue_with_other_saves(tmp_path):
    comparison = Comparison(recipe=Line(save_every=2), methods=["fast"], out=tmp_path)
    first = comparison.run(Console(quiet=True))
    (tmp_path / "fast-seed0/result.json").unlink()
    comparison = Comparison(recipe=Line(save_every=1), methods=["fast"], out=tmp_path)
    again = comparison.run(Console(quiet=True))
    assert again["fast"][0]["metrics"] == first["fast"][0]["metrics"]
    assert again["fast"][0]["config"]["save_every"] == 1


def run_with_output(comparison):
    console = Console(width=200, force_terminal=False)
    with console.capture() as captured:
        results = comparison.run(console)
    return results, captured.get()


def test_results_of_other_code_are_not_reused(tmp_path, monkeypatch):
    comparison = Comparison(recipe=Line(), methods=["fast"], out=tmp_path)
    _, text = run_with_output(comparison)
    assert "reused" not in text
    first, text = run_with_output(comparison)
    assert "fast, seed 0: reused the result of step 4." in text

    digests = digest_source(Line)
    for part, words in (("recipe", "the recipe's source"), ("constrainx", "constrainx")):
        digests = {**digests, part: f"another {part}"}
        monkeypatch.setattr(_recipe, "digest_source", lambda kind, found=digests: found)
        result = tmp_path / "fast-seed0/result.json"
        stamp = result.stat().st_mtime_ns
        everything = Comparison(recipe=Line(), methods=["fast"], out=tmp_path, reuse="all")
        _, text = run_with_output(everything)
        assert f"reused the result of step 4, although {words} has changed since." in text
        assert result.stat().st_mtime_ns == stamp
        again, text = run_with_output(comparison)
        assert f"fast, seed 0: trains anew, because {words} has changed since" in text
        assert result.stat().st_mtime_ns != stamp
        assert again["fast"][0]["metrics"] == first["fast"][0]["metrics"]
    assert len(list((tmp_path / "earlier").iterdir())) == 2
    with pytest.raises(ValueError, match="reuse"):
        Comparison(recipe=Line(), out=tmp_path, reuse="non")


def test_a_run_whose_result_was_cut_off_or_that_was_stopped_can_continue(tmp_path):
    comparison = Comparison(recipe=Line(save_every=2), methods=["fast"], out=tmp_path)
    first = comparison.run(Console(quiet=True))
    path = tmp_path / "fast-seed0/result.json"
    whole = path.read_text()
    for content in (whole[: len(whole) // 2], whole.replace('"finished"', '"asked to stop"')):
        path.write_text(content)
        again, text = run_with_output(comparison)
        assert "fast, seed 0: continued." in text
        assert again["fast"][0]["metrics"] == first["fast"][0]["metrics"]
        assert again["fast"][0]["reason"] == "finished"


def test_settings_that_a_recipe_does_not_pass_on_are_an_error(tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Deaf(Line):
        def trainer(self, **options):
            options.pop("run", None)
            settings = self.settings(**options) | {"seed": 7}
            return dataclasses.replace(super().trainer(), **settings)

    with pytest.raises(RecipeError, match="did not pass on 'seed', 'run', so options"):
        build_trainer(Deaf(), run=tmp_path / "run", progress=False)
    with pytest.raises(RecipeError, match="'seed'"):
        Comparison(recipe=Deaf(), methods=["fast"], out=tmp_path).run(Console(quiet=True))
    assert build_trainer(Line(), run=tmp_path / "run", callbacks=[Callback()])


def test_mistakes_are_found_before_anything_is_trained(tmp_path):
    with pytest.raises(ComparisonError, match="at least 1"):
        Comparison(recipe=Line(), seeds=0, out=tmp_path)
    with pytest.raises(ValueError, match="Did you mean 'slow'"):
        Comparison(recipe=Line(), methods=["fast", "slwo"], out=tmp_path)
