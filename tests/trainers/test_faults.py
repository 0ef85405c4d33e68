"""What goes wrong: signals, crashes, full disks, damaged files, numbers that are not finite."""

import gc
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import constrainx as cx
from constrainx import report
from constrainx.runtime import RunError

from .problems import Net, Recorder, arrays, assert_same_state, counter, squared, trainer

ROOT = pathlib.Path(__file__).parents[2]

# When one of many reads fails, Orbax closes its event loop before the others have ended.
unread = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. (None|.coroutine object _read)"
    ":pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def collect_garbage():
    """Collects what Orbax leaves behind, so that no other test is blamed for it."""
    yield
    gc.collect()


class ForkServer:
    """Talks to fork_server.py."""

    def __init__(self, cache):
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
        # What one process compiles, the next reads.
        environment = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags,
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainers.fork_server"],
            cwd=ROOT, env={**os.environ, **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def train(self, run, *, signal_at=None, **attempt):
        """Trains in a new process; returns the lines that it printed, and its exit code.

        Args:
            signal_at: a step, and the signal to send then.
        """
        line = json.dumps({"run": str(run), "save_every": 2, **attempt})
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        lines = []
        while True:
            said = json.loads(self._process.stdout.readline())
            if said["kind"] == "exit":
                return lines, said["code"]
            lines.append(said)
            if signal_at is not None and said["kind"] == "step" and said["step"] == signal_at[0]:
                os.kill(said["pid"], signal_at[1])

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory):
    fork_server = ForkServer(tmp_path_factory.mktemp("compiled"))
    yield fork_server
    fork_server.close()


def digests(lines):
    """A digest of the whole state at each step."""
    return {line["step"]: line["digest"] for line in lines if line["kind"] in ("start", "step")}


STEPS = 24


@pytest.fixture(scope="module")
def uninterrupted(fork_server, tmp_path_factory):
    lines, code = fork_server.train(tmp_path_factory.mktemp("uninterrupted") / "run", steps=STEPS)
    assert code == 0
    return digests(lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_before_the_run_stops(fork_server, uninterrupted, tmp_path, number):
    options = {"steps": STEPS, "save_every": 100}
    lines, code = fork_server.train(tmp_path / "run", sleep=0.05, signal_at=(5, number), **options)
    # An uncaught KeyboardInterrupt ends Python by the signal itself.
    assert code == (0 if number == signal.SIGTERM else -signal.SIGINT)
    stopped = lines[-1]
    assert stopped["reason"] == f"asked to stop by {number.name}"
    # Each step sleeps, so that the signal was heard at once.
    assert 5 <= stopped["step"] <= 7
    assert (tmp_path / "run" / "checkpoints" / str(stopped["step"])).is_dir()
    assert digests(lines).items() <= uninterrupted.items()

    lines, code = fork_server.train(tmp_path / "run", resume=True, **options)
    assert (code, lines[0]["step"], lines[-1]["reason"]) == (0, stopped["step"], "finished")
    assert lines[-2]["step"] == STEPS
    assert digests(lines).items() <= uninterrupted.items()


def test_a_run_survives_twenty_crashes_at_random_moments(fork_server, uninterrupted, tmp_path):
    random = np.random.default_rng(0)
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    crashes = interrupted_saves = 0
    saved = None
    while crashes < 20:
        every = int(random.integers(2, 4))
        if crashes % 2:
            kill = {"kill_after": float(random.uniform(0, 1.2))}
        else:
            kill = {
                "kill_at_save": int(random.integers(1, 3)),
                "delay": float(random.uniform(0, 0.2)),
            }
        options = {"steps": STEPS, "save_every": every, "sleep": 0.02}
        lines, code = fork_server.train(run, resume=saved is not None, **options, **kill)
        assert code in (0, -signal.SIGKILL)
        # It resumed from the newest complete checkpoint, with the state of an uninterrupted run.
        assert lines[0]["step"] == (saved or 0)
        assert digests(lines).items() <= uninterrupted.items()
        names = {path.name for path in checkpoints.glob("*")}
        interrupted_saves += any(name.endswith("tmp") for name in names)
        complete = [int(name) for name in names if name.isdigit()]
        assert max(complete, default=0) >= (saved or 0)
        saved = max(complete, default=None)
        if code == 0:
            assert saved == STEPS
        else:
            crashes += 1
        if code == 0 or saved is None:
            shutil.rmtree(run)
            saved = None
    # Otherwise this test would not test what it says.
    assert interrupted_saves > 3
    lines, code = fork_server.train(run, resume=saved is not None, steps=STEPS)
    assert code == 0
    assert digests(lines)[STEPS] == uninterrupted[STEPS]


# A limit that spares the metrics, and one that nothing gets past.
@pytest.mark.parametrize("limit", [30_000, 200])
def test_a_run_can_continue_if_a_checkpoint_does_not_fit_on_the_disk(fork_server, tmp_path, limit):
    options = {"kind": "heavy", "steps": 8, "sleep": 0.5}
    limits = {"3": limit, "7": -1}
    lines, code = fork_server.train(
        tmp_path / "run", limits=limits, on_save_error="continue", **options
    )
    *lines, result = lines
    assert (result["saved"], result["unsaved"]) == (8, [4, 6])
    assert (code, lines[-1]["reason"], lines[-1]["step"]) == (0, "finished", 8)
    failures = [line["message"] for line in lines if line["kind"] == "event"]
    assert len(failures) == 2
    for step, message in zip((4, 6), failures, strict=True):
        assert f"checkpoint of step {step} could not be written to {tmp_path}" in message
        assert "File too large" in message
    found = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert found == ["2", "8"]
    content = (tmp_path / "run" / "metrics.jsonl").read_text()
    logged = [json.loads(line) for line in content.splitlines()]
    assert logged[-1]["message"] == "finished"
    assert read_newest_checkpoint(fork_server, tmp_path / "run") == digests(lines)[8]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8")
    assert read_newest_checkpoint(fork_server, tmp_path / "run") == digests(lines)[2]


def read_newest_checkpoint(fork_server, run):
    """A digest of the newest checkpoint."""
    lines, code = fork_server.train(run, resume=True, kind="heavy", steps=8)
    assert code == 0
    return lines[0]["digest"]


def test_a_run_stops_if_a_checkpoint_does_not_fit_on_the_disk(fork_server, tmp_path):
    options = {"kind": "heavy", "steps": 8}
    limits = {"3": 30_000}
    lines, code = fork_server.train(tmp_path / "run", limits=limits, sleep=0.3, **options)
    assert code == 1
    assert lines[-1] == {"pid": lines[0]["pid"], "kind": "end", "step": 6, "reason": "failed"}
    assert "checkpoint of step 4 could not be written" in lines[-2]["message"]
    again, code = fork_server.train(tmp_path / "run", resume=True, **options)
    assert (code, again[0]["step"], again[-1]["step"]) == (0, 2, 8)
    before, after = digests(lines), digests(again)
    assert all(before[step] == after[step] for step in before.keys() & after.keys())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run = tmp_path_factory.mktemp("saved") / "run"
    make_wide_trainer(steps=6, save_every=2, run=run).fit()
    return run


def make_wide_trainer(**options):
    """A trainer with arrays that are too large for the index of a checkpoint."""
    return trainer(model=Net(width=512), **options)


def delete(path):
    path.unlink()


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


@unread
@pytest.mark.usefixtures("collect_garbage")
@pytest.mark.parametrize("damage", [delete, truncate, empty])
@pytest.mark.parametrize(
    "pattern",
    [
        "about/metadata",
        "state/_METADATA",
        "state/manifest.ocdbt",
        "state/d/*",
        "state/ocdbt.process_0/d/*",
    ],
)
def test_a_damaged_checkpoint_is_named_and_can_be_skipped(saved, tmp_path, pattern, damage):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    reader = READER.get("trainer") or READER.setdefault("trainer", make_wide_trainer())
    before = jax.tree.map(np.asarray, reader.state)
    files = list((run / "checkpoints" / "6").glob(pattern))
    assert files
    for file in files:
        damage(file)
    with pytest.raises(cx.CheckpointError) as error:
        reader.restore(run=run)
    for part in ("step 6", str(run / "checkpoints"), "is damaged", "--step 4", "--fallback"):
        assert part in str(error.value)
    assert_same_state(reader.state, before)
    assert reader.restore(run=run, fallback=True) == 4


# Building a trainer is most of the time that reading takes.
READER = {}


@unread
@pytest.mark.usefixtures("collect_garbage")
def test_a_run_resumes_before_a_damaged_checkpoint_and_replaces_it(saved, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    shutil.rmtree(run / "checkpoints" / "6" / "state")
    second = make_wide_trainer(steps=8, save_every=2, run=run)
    with pytest.raises(cx.CheckpointError, match=r"step 6.*damaged"):
        second.restore()
    assert second.restore(fallback=True) == 4
    second.fit()
    whole = make_wide_trainer(steps=8)
    whole.fit()
    third = make_wide_trainer(run=run)
    assert third.restore() == 8
    assert_same_state(third.state, whole.state)
    assert third.restore(6) == 6


@unread
@pytest.mark.usefixtures("collect_garbage")
def test_restoring_fails_if_every_checkpoint_is_damaged(saved, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    for step in (2, 4, 6):
        shutil.rmtree(run / "checkpoints" / str(step) / "state")
    with pytest.raises(cx.CheckpointError, match=r"step 2 .*There is none before it"):
        make_wide_trainer().restore(run=run, fallback=True)


BAD = 4


def with_nan():
    """Batches with one number that is not finite, at one step."""

    def make():
        for step, batch in enumerate(arrays().from_step(0)):
            x = batch["x"].copy()
            if step == BAD:
                x[3, 1] = np.nan
            yield {**batch, "x": x}

    return cx.data.from_iterable(make, batch=8)


class Breaks(cx.Constraint):
    """‖hidden kernel‖² = 1, with a residual that is infinite if the batch says so."""

    def residual(self, model, batch, *, key):
        kernel = model.hidden.kernel[...]
        return jnp.where(batch["broken"][0] > 0, jnp.inf, 1.0) * (jnp.sum(kernel**2) - 1)


def with_broken():
    def make():
        for step, batch in enumerate(arrays().from_step(0)):
            yield {**batch, "broken": np.full(8, step >= BAD, np.float32)}

    return cx.data.from_iterable(make, batch=8)


CASES = {
    "loss": {"data": with_nan},
    "constraint 'breaks'": {"data": with_broken, "constraints": [Breaks(gamma=0.5)]},
}


def options_of(case):
    options = CASES[case]
    return {**options, "data": options["data"]()}


@pytest.mark.parametrize("case", CASES)
def test_a_step_that_is_not_finite_stops_the_run(tmp_path, case):
    recorder = Recorder()
    bad = trainer(
        **options_of(case),
        steps=12,
        save_every=3,
        run=tmp_path / "run",
        callbacks=[recorder],
    )
    with pytest.raises(cx.NonFiniteError) as error:
        bad.fit()
    for part in (f"step {BAD} was not finite: {case}", "of step 3", "on_nonfinite='skip'"):
        assert part in str(error.value)
    assert recorder.events[-1][1].startswith(f"step {BAD} was not finite: {case}")
    assert recorder.ended[-1][1] == "failed"
    good = trainer(**options_of(case), steps=BAD)
    good.fit()
    # The state is that before the bad step, its count included.
    assert_same_state(bad.state._replace(health=good.state.health), good.state)
    checkpoints = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert checkpoints == [3]
    third = trainer(**options_of(case), steps=12, run=tmp_path / "run")
    third.restore()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(third.state.parameters))
    assert_same_state(third.state.health, good.state.health)
    # Once more, the same: it does not stand still and call that training.
    with pytest.raises(cx.NonFiniteError, match=f"step {BAD} was not finite"):
        third.fit()


def test_a_step_that_is_not_finite_can_be_skipped(tmp_path):
    recorder = Recorder()
    options = {"data": with_nan(), "on_nonfinite": "skip", "log_every": 3}
    skipping = trainer(**options, steps=8, callbacks=[recorder], run=tmp_path / "run")
    result = skipping.fit()
    assert (result.reason, result.step) == ("finished", 8)
    (event,) = recorder.events
    assert event == (6, f"step {BAD} was not finite: loss; skipped 1 steps since the last log")
    # The means are over steps that were taken.
    assert all(np.isfinite(m["loss"]) for m in recorder.logged.values())

    def make():
        for step, batch in enumerate(arrays().from_step(0)):
            if step != BAD:
                yield batch

    without = trainer(data=cx.data.from_iterable(make, batch=8), steps=7)
    without.fit()
    assert_same_state(skipping.state.parameters, without.state.parameters)
    assert_same_state(skipping.state.optimizer, without.state.optimizer)
    # A run that was to skip can be continued by one that is to stop.
    third = trainer(data=arrays(), steps=10, run=tmp_path / "run")
    third.restore()
    before = jax.tree.map(np.asarray, third.state.parameters)
    third.fit()
    assert not np.array_equal(
        jax.tree.leaves(before)[0], jax.tree.leaves(third.state.parameters)[0]
    )


def test_each_skipped_step_is_reported():
    def make():
        for step, batch in enumerate(arrays().from_step(0)):
            yield {**batch, "x": batch["x"] * (np.nan if step in (1, 5) else 1)}

    recorder = Recorder()
    data = cx.data.from_iterable(make, batch=8)
    trainer(data=data, on_nonfinite="skip", log_every=2, steps=8, callbacks=[recorder]).fit()
    assert [(step, message.split(":")[0]) for step, message in recorder.events] == [
        (2, "step 1 was not finite"),
        (6, "step 5 was not finite"),
    ]


def never_runs(model, batch):
    raise AssertionError("a step was traced")


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for run in ("/proc/run", tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunError, match=f"{run} cannot be written to"):
            counter(loss=never_runs, run=run).fit()
    assert (tmp_path / "file").read_text() == "in the way"


HOLDER = """
import fcntl, sys
with open(sys.argv[1], "a+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write("process 1 on somewhere")
    file.flush()
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_that_another_process_uses_is_refused(tmp_path):
    run = tmp_path / "run"
    counter(steps=2, run=run).fit()
    before = (run / "environment.json").read_bytes()
    (run / "lock").write_text("")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run / "lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as holder:  # fmt: skip
        assert holder.stdout.readline() == "held\n"
        for resuming in (False, True):
            second = counter(loss=never_runs, run=run)
            if resuming:
                second.restore()
            with pytest.raises(RunError, match=f"{run} is in use by process 1 on somewhere"):
                second.fit()
        holder.communicate("")
    assert (run / "environment.json").read_bytes() == before
    # The lock goes with the process.
    third = counter(steps=3, run=run)
    third.restore()
    assert third.fit().step == 3


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    run = tmp_path / "run"
    counter(steps=2, run=run).fit()
    with pytest.raises(RunError, match=f"{run} holds a run already.*constrainx resume {run}"):
        counter(loss=never_runs, run=run).fit()


def test_resuming_with_other_settings_is_refused(tmp_path):
    run = tmp_path / "run"
    counter(steps=2, run=run, config={"rate": 0.1, "path": tmp_path}).fit()
    second = counter(loss=never_runs, run=run, config={"rate": 0.2, "path": tmp_path, "new": 1})
    second.restore()
    with pytest.raises(RunError, match=r"new was 'nothing', now 1; rate was 0.1, now 0.2"):
        second.fit()
    (run / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config.json is damaged"):
        second.fit()


def test_a_line_of_metrics_that_was_cut_off_is_removed(tmp_path):
    run = tmp_path / "run"
    counter(steps=2, run=run).fit()
    path = run / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 3, "kind": "tr')
    second = counter(steps=4, run=run)
    second.restore()
    second.fit()
    assert path.read_bytes().startswith(whole)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["message"] for line in lines if line["kind"] == "event"] == [
        "finished", "resumed from step 2", "finished"
    ]  # fmt: skip


def test_an_error_of_the_users_code_leaves_a_folder_that_can_be_resumed(tmp_path):
    class Fails(cx.Callback):
        def on_log(self, step, metrics):
            if step == 3:
                raise KeyError("mine")

    options = {"save_every": 2, "log_every": 1, "run": tmp_path / "run"}
    with pytest.raises(KeyError, match="mine"):
        trainer(steps=6, callbacks=[Fails()], **options).fit()
    second = trainer(steps=6, **options)
    assert second.restore() == 2
    second.fit()
    whole = trainer(loss=squared, steps=6)
    whole.fit()
    assert_same_state(second.state, whole.state)


def test_a_full_disk_is_reported_in_one_sentence_and_leaves_what_is_there(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.json", "environment.json"):
        # A device on which there is never any space.
        (run / f"{name}.part").symlink_to("/dev/full")
        with pytest.raises(RunError, match=f"{name} could not be written: No space left"):
            counter(loss=never_runs, run=run, steps=2).fit()
        assert not (run / name).exists()
        (run / "config.json").unlink(missing_ok=True)
    counter(steps=2, run=run).fit()
    shutil.rmtree(run / "tensorboard")
    (run / "tensorboard").write_text("in the way")
    second = counter(steps=3, run=run)
    second.restore()
    assert second.fit().saved == 3


@pytest.mark.parametrize("tail", [b"\0" * 500, b'{"step": 3, "kin', b""])
def test_metrics_survive_what_a_power_cut_leaves(tmp_path, tail):
    run = tmp_path / "run"
    counter(steps=2, run=run, log_every=1).fit()
    path = run / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    inode = path.stat().st_ino
    second = counter(steps=3, run=run, log_every=1)
    second.restore()
    second.fit()
    assert path.read_bytes().startswith(whole)
    # The lines that are there are never written again, so that no crash can lose them.
    assert path.stat().st_ino == inode
    assert [row["step"] for row in report.load(run).train] == [1, 2, 3]
    path.write_bytes(whole + b"\0" * 9 + path.read_bytes()[len(whole) :])
    assert [row["step"] for row in report.load(run).train] == [1, 2, 3]
