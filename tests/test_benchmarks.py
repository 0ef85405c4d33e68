"""The benchmarks run, at a size that takes seconds."""

import json

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import growth


def test_a_benchmark_writes_its_table_figures_and_plot(tmp_path, capsys):
    benchmarks.main(["toy", "--quick", "--out", str(tmp_path)])
    assert "null space" in capsys.readouterr().out
    assert (tmp_path / "toy.md").read_text().startswith("# toy")
    assert (tmp_path / "toy.json").exists()
    assert (tmp_path / "toy.png").stat().st_size > 10_000


def test_a_wrong_name_gets_the_nearest(capsys):
    with pytest.raises(SystemExit):
        benchmarks.main(["adjiont"])
    assert "Did you mean 'adjoint'" in capsys.readouterr().err


def test_augmentations_are_timed_one_by_one_and_together(tmp_path, capsys):
    benchmarks.main(["images", "--quick", "--out", str(tmp_path)])
    written = capsys.readouterr().out
    for name in ("RandomCrop", "RandAugment", "MixImages", "crop, flip, normalise", "all"):
        assert name in written


def test_peers_solve_the_same_system_to_the_same_tolerance(tmp_path):
    benchmarks.main(["peers", "--quick", "--out", str(tmp_path)])
    (table, *_) = json.loads((tmp_path / "peers.json").read_text())["tables"]
    rows = {row["method"]: row for row in table["rows"]}
    for method in ("constrainx, Gram", "matfree, LSMR", "lineax, LSMR", "dense pinv"):
        assert rows[method]["residual"] < 1e-5
    assert rows["no constraint"]["residual"] == pytest.approx(1.0)
    assert (tmp_path / "peers.png").stat().st_size > 10_000


def test_growth_is_fitted_by_a_power(tmp_path):
    assert growth.fit_power([1, 10, 100], [3.0, 30.0, 300.0]) == pytest.approx(1.0)
    assert growth.fit_power([2, 4, 8], [5.0, 20.0, 80.0]) == pytest.approx(2.0)
    benchmarks.main(["growth", "--quick", "--out", str(tmp_path)])
    (exponents, _) = json.loads((tmp_path / "growth.json").read_text())["tables"]
    budget = exponents["rows"][0]
    assert 0.8 < budget["memory"] < 1.05  # a figure of XLA's plan, so that noise is no excuse


def test_twice_keeps_the_cost_of_a_row_apart(tmp_path):
    benchmarks.main(["twice", "--quick", "--out", str(tmp_path)])
    (table,) = json.loads((tmp_path / "twice.json").read_text())["tables"]
    rows = {row["step"]: row for row in table["rows"]}
    assert rows["Adam"]["besides the row"] == rows["Adam"]["/ Adam"] == 1.0
    assert rows["stored row, twice"]["besides the row"] < rows["stored row, twice"]["/ Adam"]


def test_passes_are_counted_where_the_compiler_is_and_explained_where_not(tmp_path, capsys):
    benchmarks.main(["passes", "--quick", "--out", str(tmp_path)])
    (table,) = json.loads((tmp_path / "passes.json").read_text())["tables"]
    if table["rows"]:
        (adam,) = table["rows"]
        # Parameters and moments are read and written, the gradient is read.
        assert adam["passes"] == pytest.approx(7, rel=0.01)
    else:
        assert "constrainx[plan]" in capsys.readouterr().out
