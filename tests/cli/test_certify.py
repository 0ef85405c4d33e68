"""`constrainx certify`, what it leaves in the run's folder, and what the report shows of it."""

import json
import shutil

import pytest

from constrainx import report


@pytest.fixture(scope="module")
def run(finished, tmp_path_factory):
    return shutil.copytree(finished, tmp_path_factory.mktemp("certify") / "run")


def test_certify_records_what_it_finds(constrainx, run, tmp_path):
    before = json.loads((run / "result.json").read_text())
    code, text = constrainx("certify", run, "--devices", 1)
    after = json.loads((run / "result.json").read_text())
    certificate = after.pop("certificate")
    found = certificate["constraints"]["O(3)"]
    assert code == 1
    assert "NO" in text
    assert after == before
    assert (certificate["step"], certificate["met"]) == (16, False)
    assert (found["unit"], found["count"]) == ("example", 100)
    # Each example once, with other draws of the group than the evaluation.
    assert found["mean"] == pytest.approx(before["metrics"]["violation/O(3)"], rel=0.3)
    page = report.write([run], out=tmp_path / "page").read_text()
    assert "Constraints on held-out data" in page
    assert f"<td>{found['upper']:.4g}</td>" in page
    assert "<strong>no</strong>" in page


def test_certify_of_a_run_without_a_result_writes_a_file_of_its_own(constrainx, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "result.json").unlink()
    code, text = constrainx("certify", run, "--devices", 2, "--step", 8, "--share", 0.5)
    assert code == 1, text
    assert json.loads((run / "certificate.json").read_text())["step"] == 8
    assert not (run / "result.json").exists()


def test_a_result_that_was_cut_off_is_not_overwritten(constrainx, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "result.json").write_text('{"step": 1')
    code, text = constrainx("certify", run, "--devices", 1)
    assert code == 1
    assert "result.json is not JSON" in text
    assert (run / "result.json").read_text() == '{"step": 1'


def test_doctor_examines_recipes_and_runs(constrainx, run):
    code, text = constrainx("doctor", "o3-inertia", "--size", "smoke", "--devices", 1)
    assert code == 0, text
    assert "o3-inertia nullspace, step 0" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "every row has examples of its own" in text.replace("\n  ", " ")
    code, text = constrainx("doctor", run, "--step", 8, "--devices", 1)
    assert code == 0, text
    assert "o3-inertia nullspace, step 8" in text
