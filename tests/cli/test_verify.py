"""`constrainx verify`."""

import shutil


def test_verify_prints_a_line_for_each_checkpoint(constrainx, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    code, text = constrainx("verify", run)
    assert code == 0, text
    assert [line.split(",")[0] for line in text.splitlines()] == ["step 8: good", "step 16: good"]
    path = run / "checkpoints" / "16" / "about" / "metadata"
    path.write_bytes(path.read_bytes().replace(b'"step": 16', b'"step": 17'))
    shutil.rmtree(run / "checkpoints" / "8" / "manifest")
    code, text = constrainx("verify", run)
    assert code == 1
    old, damaged = text.splitlines()
    assert old.startswith("step 8: can be read, but has no digests")
    assert damaged == ("step 16: damaged: ValueError: about/metadata is not what was written")
    code, text = constrainx("verify", tmp_path)
    assert code == 1
    assert "has no complete checkpoint" in text
