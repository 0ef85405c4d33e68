"""The benchmarks run, at a size that takes seconds."""

import pytest

from benchmarks import __main__ as benchmarks


@pytest.mark.parametrize("name", ["toy", "solve"])
def test_quick(name, tmp_path, capsys):
    benchmarks.main([name, "--quick", "--out", str(tmp_path)])
    assert "Goal" in capsys.readouterr().out
    assert (tmp_path / f"{name}.md").read_text().startswith(f"# {name}")
    assert (tmp_path / f"{name}.json").exists()


def test_a_wrong_name_gets_the_nearest(capsys):
    with pytest.raises(SystemExit):
        benchmarks.main(["adjiont"])
    assert "did you mean 'adjoint'" in capsys.readouterr().err
