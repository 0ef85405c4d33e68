"""The benchmarks run, at a size that takes seconds."""

import pytest

from benchmarks import __main__ as benchmarks


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
