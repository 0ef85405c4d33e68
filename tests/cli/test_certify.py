"""`constrainx certify`, what it leaves in the run's folder, and what the report shows of it."""

import errno
import json
import os
import shutil

import pytest
from flax import nnx

import constrainx as cx
from constrainx import report
from constrainx.recipes import record_certificate
from constrainx.runtime import RunError


@pytest.fixture(scope="module")
def run(finished, tmp_path_factory):
    return shutil.copytree(finished, tmp_path_factory.mktemp("certify") / "run")


@pytest.fixture(scope="module")
def certificate():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    return cx.certify(model, cx.UnitNorm(of=lambda m: m.kernel[...]))


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
    assert "result.json is damaged" in text
    assert (run / "result.json").read_text() == '{"step": 1'


@pytest.mark.parametrize(
    ("content", "finding"),
    [
        (b"[]", "must be a JSON object"),
        (b"[" * 100_000, "nested too deep"),
        (b"\xff", "not text in UTF-8"),
        (b"\0" * 50, "nothing but zeros"),
    ],
    ids=["list", "deep", "bytes", "zeros"],
)
def test_a_damaged_result_gets_no_certificate(content, finding, certificate, tmp_path):
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(RunError, match=f"result.json is damaged.*{finding}"):
        record_certificate(tmp_path, certificate, step=1)
    assert path.read_bytes() == content


def test_a_certificate_that_does_not_fit_on_the_disk_is_one_sentence(
    certificate, tmp_path, monkeypatch
):
    def fill_the_disk(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "result.json").write_text("{}")
    monkeypatch.setattr(os, "fsync", fill_the_disk)
    with pytest.raises(RunError, match=r"could not be written to .*No space left on device"):
        record_certificate(tmp_path, certificate, step=1)
    assert (tmp_path / "result.json").read_text() == "{}"
    assert len(list(tmp_path.iterdir())) == 1


def test_doctor_examines_recipes_and_runs(constrainx, run):
    code, text = constrainx("doctor", "o3-inertia", "--size", "smoke", "--devices", 1)
    assert code == 0, text
    assert "o3-inertia nullspace, step 0" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "every row has examples of its own" in text.replace("\n  ", " ")
    code, text = constrainx("doctor", run, "--step", 8, "--devices", 1)
    assert code == 0, text
    assert "o3-inertia nullspace, step 8" in text
