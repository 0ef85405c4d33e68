"""What was saved is what is restored, or an error says that it is not."""

import contextlib
import errno
import gc
import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import constrainx as cx
from constrainx.errors import ArgumentError
from constrainx.runtime import Checkpoints, StoredCheckpoints
from constrainx.runtime._digest import PERIOD, _column_keys, _scramble, digest_array
from constrainx.runtime._manifest import digest_object, read_manifest

MESH = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])


def split(array, *axes):
    return jax.device_put(array, NamedSharding(MESH, PartitionSpec(*axes)))


def digest_word_by_word(array):
    """The formula at the top of _digest.py, in Python's integers."""
    words = np.asarray(array).reshape(-1)
    each = max(1, words.dtype.itemsize // 4)
    words = words.view(f"u{words.dtype.itemsize // each}")
    rows = _scramble(np.arange(len(words) // PERIOD + 1, dtype=np.uint64) + np.uint64(2**63))
    columns = _column_keys()
    return sum(
        int(rows[i // PERIOD]) * int(columns[i % PERIOD]) * int(word)
        for i, word in enumerate(words)
    ) % 2**64  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8, bool])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((), ()),
        ((0, 3), ()),
        ((PERIOD + 100,), (("a", "b"),)),
        ((4, 6, 10), (None, "a", "b")),
        ((4, PERIOD), (None, ("a", "b"))),
        ((2, 10, 3), ("b",)),
    ],
)
def test_a_digest_does_not_depend_on_how_an_array_is_split(shape, axes, dtype):
    array = np.asarray(np.random.default_rng(0).normal(size=shape) * 3, np.float32).astype(dtype)
    wanted = digest_word_by_word(array)
    assert digest_array(array) == wanted
    assert digest_array(split(array, *axes)) == wanted


def test_a_digest_depends_on_the_position_of_a_bit():
    array = np.random.default_rng(0).normal(size=(3, PERIOD // 2)).astype(np.float32)
    digests = {digest_array(array)}
    for position in range(0, array.size, 97):
        other = array.copy()
        other.reshape(-1)[position] *= -1  # the highest bit, which a careless sum would lose
        digests.add(digest_array(other))
        other.reshape(-1)[-1 - position] *= -1
        digests.add(digest_array(other))
    assert len(digests) == 1 + 2 * len(range(0, array.size, 97))


def make_state():
    random = np.random.default_rng(0)
    return {
        "noise": split(random.normal(size=(64, 200)).astype(np.float32), "a"),
        "zeros": split(np.zeros((50, 50), np.float32)),
        "bits": split(random.integers(0, 2, 300).astype(bool)),
        "count": split(np.int32(7)),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, make_state(), about={"seconds": 1.5}, metrics={"error": 0.25})
    checkpoints.save(2, make_state(), about={"seconds": 2.5}, metrics={"error": 0.125})
    checkpoints.close()
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def files_of(step):
    return sorted(path for path in step.rglob("*") if path.is_file())


def test_a_flipped_bit_is_found_or_changes_nothing(copied):
    checkpoints = StoredCheckpoints(copied)
    random = np.random.default_rng(0)
    state = make_state()
    files = files_of(copied / "2")
    found = 0
    for file in [*files, *random.choice(files, 40)]:
        content = file.read_bytes()
        if not content:
            continue
        flipped = bytearray(content)
        flipped[random.integers(len(content))] ^= 1 << random.integers(8)
        file.write_bytes(flipped)
        try:
            restored = checkpoints.restore(2, state)
        except cx.CheckpointError:
            found += 1
        else:
            jax.tree.map(np.testing.assert_array_equal, restored.state, state)
            assert restored.about["metrics"] == {"error": 0.125}
            assert restored.about["seconds"] == 2.5
        file.write_bytes(content)
    # How many matter depends on the names and lengths of the files, which vary a little.
    assert found > 10
    assert checkpoints.verify(2) == (4, True)


def swap_arrays(step, state):
    """Replaces the arrays of a checkpoint by others, with no trace of damage in any file."""
    other = Checkpoints(step.parent.parent / "other")
    other.save(1, state, about={}, metrics={})
    other.close()
    shutil.rmtree(step / "state")
    shutil.copytree(other.folder / "1" / "state", step / "state")


def test_an_array_that_was_changed_is_named(copied):
    state = make_state()
    swap_arrays(copied / "2", {**state, "noise": state["noise"].at[63, 199].multiply(2)})
    checkpoints = StoredCheckpoints(copied)
    for read in (
        lambda: checkpoints.restore(2, make_state()),
        lambda: checkpoints.verify(2),
        lambda: checkpoints.read_arrays(2, ""),
    ):
        with pytest.raises(
            cx.CheckpointError, match=r"step 2 .*damaged.*noise: not what was saved"
        ):
            read()
    assert set(checkpoints.read_arrays(2, "count")) == {"count"}
    found = checkpoints.restore_first_readable([2, 1], make_state())
    assert found.about["seconds"] == 1.5


def test_a_checkpoint_is_verified_on_other_devices(saved):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[5])
    alone = jax.tree.map(lambda leaf: jax.device_put(leaf, one), make_state())
    found = StoredCheckpoints(saved).restore(1, alone)
    assert found.notes == []
    jax.tree.map(np.testing.assert_array_equal, found.state, make_state())
    assert found.state["noise"].sharding == one


def test_a_checkpoint_without_a_manifest_restores_with_a_note(copied):
    shutil.rmtree(copied / "1" / "manifest")
    checkpoints = StoredCheckpoints(copied)
    found = checkpoints.restore(1, make_state())
    jax.tree.map(np.testing.assert_array_equal, found.state, make_state())
    assert any("no digests" in note for note in found.notes)
    assert checkpoints.verify(1) == (4, False)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 90,
        b"\xff\xfe{}",
        b"[" * 100_000,
        b"[1, 2]",
        b'{"metrics": [1',
        b'{"metrics": 3}',
    ],
    ids=["empty", "zeros", "not-utf-8", "deep", "list", "half", "number"],
)
def test_a_bad_file_of_an_old_checkpoint_harms_no_other(copied, content):
    wanted = make_state()
    for number, file in enumerate(files_of(copied / "1")):
        before = file.read_bytes()
        file.write_bytes(content)
        kind = (Checkpoints, StoredCheckpoints)[number % 2]
        checkpoints = kind(copied, metric="error")
        assert checkpoints.find("last") == checkpoints.find("best") == 2
        assert checkpoints.restore(2, wanted).about["seconds"] == 2.5
        # An error of ours or, for a file that nobody needs, no error.
        with contextlib.suppress(cx.CheckpointError):
            checkpoints.restore(1, wanted)
        checkpoints.close()
        file.write_bytes(before)
    gc.collect()


@pytest.mark.parametrize("letter", "[]*?\\")
def test_a_path_that_orbax_takes_for_a_pattern_is_refused(tmp_path, letter):
    folder = tmp_path / f"run{letter}1"
    with pytest.raises(ArgumentError, match="must not contain"):
        cx.RunFolder(folder)
    with pytest.raises(ArgumentError, match="must not contain"):
        StoredCheckpoints(folder / "checkpoints")
    assert not folder.exists()
    assert cx.RunFolder(pathlib.Path("runs/a b, {c}=(1)~!")).path.name == "a b, {c}=(1)~!"


def test_a_manifest_of_several_processes_is_about_what_the_first_recorded(tmp_path):
    """Each has its own clock, and Orbax writes what process 0 says."""
    (tmp_path / "manifest").mkdir()
    for process, seconds in enumerate([1.5, 1.6]):
        about = digest_object({"step": 3, "seconds": seconds})
        content = {"processes": 2, "about": about, "arrays": {}}
        text = json.dumps({**content, "checksum": digest_object(content)})
        (tmp_path / "manifest" / f"process-{process}.json").write_text(text)
    found = read_manifest(tmp_path)
    assert found.about == digest_object({"step": 3, "seconds": 1.5})


def test_nothing_incomplete_is_left_of_saves_that_failed(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)

    def write(step):
        (tmp_path / f"{step}.orbax-checkpoint-tmp").mkdir()

    def fail(step, **options):
        write(step)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints._manager, "save", fail)
    for step in (2, 4):
        with pytest.raises(cx.CheckpointError, match="No space left on device"):
            checkpoints.save(step, {"x": jnp.zeros(2)}, about={}, metrics={})
        write(step)  # by a thread that did not notice
    checkpoints.close()
    assert not list(tmp_path.iterdir())
