"""Sweeps of a method's fields, and differences between paired seeds."""

import dataclasses
import json
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console
from scipy import stats

from constrainx import data
from constrainx.constraints import Constraint
from constrainx.recipes import Comparison, ComparisonError, Recipe, SweepError
from constrainx.recipes._paired import describe_pairs, tabulate_pairs
from constrainx.recipes._sweep import choose, find_front, spread
from constrainx.recipes._sweep_table import Tried, tabulate_tried
from constrainx.recipes._tables import Grid
from constrainx.report import Point, draw_front
from constrainx.step import Penalty
from constrainx.trainers import Evaluation, Trainer

QUIET = Console(quiet=True)
AXES = ("error", "violation/zero")


class Number(nnx.Module):
    def __init__(self, start):
        self.value = nnx.Param(jnp.asarray(start, jnp.float32))


@dataclasses.dataclass(frozen=True)
class Zero(Constraint):
    def residual(self, model, batch, *, key):
        return model.value[...][None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tug(Recipe):
    """½(θ − 1)² + w/2 θ², whose minimum 1 / (1 + w) is known."""

    name: ClassVar[str] = "tug"
    methods: ClassVar = {"penalty": {}, "plain": {"weight": 0.0}}
    figures: ClassVar = {"error": "error", "violation/zero": "violation"}
    sweeps: ClassVar = {"penalty": {"weight": (0.1, 10.0)}}
    validation: ClassVar = {"held_out": True}

    steps: int = 120
    weight: float = 1.0
    held_out: bool = False
    devices: int | None = 1
    log_every: int = 60

    def trainer(self, **options):
        x = {"x": np.ones((4, 1), np.float32)}
        # What is held out says nothing else, and is a little harder.
        shift = 0.5 if self.held_out else 0.0
        return Trainer(
            model=Number(0.1 * (self.seed % 7)),
            loss=lambda model, batch: (model.value[...] - 1) ** 2 / 2,
            optimizer=optax.sgd(0.15),
            data=data.arrays(x, batch=4),
            steps=self.steps,
            constraints=[Zero(name="zero")],
            method=Penalty(self.weight),
            evaluation=Evaluation(
                data.arrays(x, batch=4),
                metrics={
                    "error": lambda m, b: shift + (m.value[...] - b["x"]) ** 2,
                },
            ),
            **self.settings(**{"progress": False, **options}),
        )


def found(*pairs):
    return [{"metrics": dict(zip(AXES, pair, strict=True))} for pair in pairs]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    out = tmp_path_factory.mktemp("swept")
    comparison = Comparison(recipe=Tug(), seeds=2, out=out, sweep=3, choose="violation")
    return comparison, comparison.run(QUIET), json.loads((out / "compare.json").read_text())


def test_values_are_tried_at_equal_factors():
    assert [v["w"] for v in spread({"w": (0.01, 100.0)}, 5)] == [0.01, 0.1, 1.0, 10.0, 100.0]
    assert spread({"w": (0.1, 10.0)}, 1) == [{"w": 1.0}]


def test_several_fields_are_spread_over_the_whole_box():
    points = spread({"a": (1e-2, 1e2), "b": (1.0, 1e4)}, 64)
    shares = np.array([[math.log10(p["a"]) / 4 + 0.5, math.log10(p["b"]) / 4] for p in points])
    assert (shares >= 0).all()
    assert (shares < 1.001).all()
    # Every quarter of the square has a quarter of the points, closer than random draws come: the
    # standard deviation of their numbers would be 3.5.
    quarters = np.bincount((shares[:, 0] > 0.5) * 2 + (shares[:, 1] > 0.5), minlength=4)
    assert np.abs(quarters - 16).max() <= 2
    # And the projections on each field do not fall together.
    assert len({p["a"] for p in points}) == len({p["b"] for p in points}) == 64


def test_the_rule_says_what_is_best():
    runs = found((1.0, 8.0), (2.0, 3.0), (7.0, 1.0))
    assert [choose(runs, AXES, rule) for rule in ("error", "violation", "product")] == [0, 2, 1]
    # A run that diverged, or has no figures, is never the best; ties go to less violation.
    assert (
        choose([*found((math.nan, 0.0)), {"metrics": {}}, *found((9.0, 9.0))], AXES, "error") == 2
    )
    assert choose(found((1.0, 2.0), (1.0, 1.0)), AXES, "error") == 1
    with pytest.raises(SweepError, match="needs a violation"):
        choose(runs, AXES[:1], "product")


def test_the_front_is_what_no_other_point_beats():
    rng = np.random.default_rng(0)
    points = [tuple(point) for point in rng.uniform(size=(60, 2))]
    expected = [not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points) for p in points]
    assert find_front(points) == expected
    assert find_front([(1.0, 1.0), (1.0, 1.0), (math.inf, 0.0)]) == [True, True, False]


def test_what_was_tried_has_the_figures_of_the_closed_form(swept):
    _, _, record = swept
    assert [one["values"]["weight"] for one in record["tried"]] == [0.1, 1.0, 10.0]
    for one in record["tried"]:
        theta = 1 / (1 + one["values"]["weight"])
        assert one["metrics"]["error"] == pytest.approx(0.5 + (theta - 1) ** 2, abs=1e-3)
        assert one["metrics"]["violation/zero"] == pytest.approx(theta, abs=1e-3)
    assert [one["best"] for one in record["tried"]] == [False, False, True]
    assert record["rule"] == "violation"


def test_the_best_is_chosen_on_other_data_and_another_seed_than_those_reported(swept):
    comparison, results, _ = swept
    chosen = {
        path.parent.name: json.loads(path.read_text())["config"]
        for path in comparison.out.glob("sweep/*/result.json")
    }
    assert set(chosen) == {f"penalty weight {value}" for value in ("0.1", "1", "10")}
    reported = [run["config"] for run in results["penalty"]]
    assert {config["weight"] for config in reported} == {10.0}
    assert not {config["seed"] for config in reported} & {c["seed"] for c in chosen.values()}
    assert all(config["held_out"] for config in chosen.values())
    assert not any(config["held_out"] for config in reported)
    # The other method has nothing to sweep, and stays as it is.
    assert {run["config"]["weight"] for run in results["plain"]} == {0.0}


def test_the_rule_the_budget_and_the_front_are_reported(swept):
    comparison, _, _ = swept
    text = (comparison.out / "compare.md").read_text()
    assert "| penalty | weight 10 |" in text
    assert text.count(" yes ") == 4  # all three are on the front, and one is chosen, too
    assert "held-out training data" in text
    assert "smallest violation, from 3 for each" in text
    assert "Minus penalty, over 2 paired seeds" in text


def test_a_sweep_is_not_repeated_and_survives_values_that_diverge(tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wild(Tug):
        sweeps: ClassVar = {"penalty": {"weight": (1.0, 1000.0)}}

    comparison = Comparison(recipe=Wild(), methods=["penalty"], out=tmp_path, sweep=2)
    first = comparison.run(QUIET)
    assert first["penalty"][0]["config"]["weight"] == 1.0
    failed = tmp_path / "sweep/penalty weight 1000/result.json"
    assert json.loads(failed.read_text())["reason"] == "failed"
    stamp = failed.stat().st_mtime_ns
    assert comparison.run(QUIET) == first
    assert failed.stat().st_mtime_ns == stamp


def test_mistakes_in_a_sweep_are_found_before_anything_is_trained(tmp_path):
    def sweep(**ranges):
        kind = dataclasses.dataclass(frozen=True, kw_only=True)(
            type("Other", (Tug,), {"sweeps": ranges, "__module__": __name__})
        )
        return Comparison(recipe=kind(), out=tmp_path, sweep=2)

    with pytest.raises(SweepError, match="Did you mean 'penalty'"):
        sweep(penalti={"weight": (1.0, 2.0)})
    with pytest.raises(SweepError, match="Did you mean 'weight'"):
        sweep(penalty={"wieght": (1.0, 2.0)})
    with pytest.raises(SweepError, match="positive numbers"):
        sweep(penalty={"weight": (0.0, 2.0)})
    with pytest.raises(SweepError, match=r"given by hand.*--weight"):
        Comparison(recipe=Tug(weight=3.0), out=tmp_path, sweep=2)
    with pytest.raises(ComparisonError, match="at most 1000"):
        Comparison(recipe=Tug(), out=tmp_path, seeds=1001)


def test_paired_differences_agree_with_a_paired_t_test():
    rng = np.random.default_rng(1)
    seeds = rng.normal(size=6)
    a, b = seeds + 0.1 * rng.normal(size=6) - 0.2, seeds
    mean, error = (float(word) for word in describe_pairs([*a], [*b])[0].split(" ± "))
    t = stats.ttest_rel(a, b).statistic
    assert mean == pytest.approx(np.mean(a - b), rel=0.01)
    assert mean / error == pytest.approx(t, rel=0.06)  # two digits of the error are shown
    assert describe_pairs([*a], [*b])[1] == f"{(a < b).sum()} of 6"


def test_pairs_need_two_seeds_and_finite_figures():
    one, two = found((1.0, 1.0)), found((1.0, math.nan), (2.0, 1.0))
    assert tabulate_pairs({"a": one, "b": one}, AXES, {}) is None
    grid = tabulate_pairs({"a": found((2.0, 1.0), (4.0, 1.0)), "b": two}, AXES, {})
    assert grid.rows == [["b", "-1.5 ± 0.5", "2 of 2", "–", "0 of 2"]]


def test_a_wide_table_becomes_several_that_fit(capsys):
    headings = ["method", *(f"a long heading {i}" for i in range(7))]
    rows = [["a method with a name", *(f"0.12{i} ± 0.004" for i in range(7))]] * 2
    parts = Grid("Title", headings, rows).fit(80)
    assert [heading for part in parts for heading in part.headings[1:]] == headings[1:]
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part.draw())
    text = captured.get()
    assert max(map(len, text.splitlines())) <= 80
    assert all(text.count(f"0.12{i} ± 0.004") == 2 for i in range(7))  # no cell was broken
    assert Grid("Title", headings, rows).fit(400)[0].headings == headings


def test_the_picture_has_a_point_for_every_run(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    scatter = Axes.scatter
    monkeypatch.setattr(
        Axes, "scatter", lambda self, x, y, **k: (drawn.append((x, y)), scatter(self, x, y, **k))
    )
    points = [Point("a_$x", (0.1 * i, 10.0**-i), 1.0, i < 3) for i in range(1, 6)]
    points.append(Point("lost", (None, 1.0), 1.0, True))
    draw_front(points, ["error", "violation"], path=tmp_path / "front.png")
    places = sorted(
        zip(*(sum(axis, start=()) for axis in zip(*drawn[:2], strict=True)), strict=True)
    )
    assert places == sorted((10.0**-i, 0.1 * i) for i in range(1, 6))
    draw_front([], ["error"], path=tmp_path / "empty.png")
    assert (tmp_path / "empty.png").exists()


def test_a_table_of_what_was_tried_marks_front_and_choice():
    runs = [(0.1, (1.0, 3.0)), (1.0, (2.0, 4.0)), (10.0, (math.inf, math.inf))]
    tried = [Tried("m", {"w": w}, found(figures)[0], is_best=w == 0.1) for w, figures in runs]
    assert tabulate_tried(tried, AXES, {}).rows == [
        ["m", "w 0.1", "1", "3", "yes", "yes"],
        ["m", "w 1", "2", "4", "", ""],
        ["m", "w 10", "–", "–", "", ""],
    ]
