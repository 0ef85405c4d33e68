"""Two real processes with two simulated devices each, joined by JAX's own service."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
import socket
import tempfile
import time

import jax
import numpy as np
import pytest

from constrainx.runtime import _distributed as distributed
from constrainx.runtime import _preemption as preemption
from constrainx.runtime import _sharding as sharding
from tests.distributed import small


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


# Its processes start from one that has imported JAX already, which takes most of a start.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.distributed.small"])


class Child:
    """A process of a run, with its output in files."""

    def __init__(self, function, *arguments, folder, devices=2):
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        handle, self._out = tempfile.mkstemp(dir=folder)
        os.close(handle)
        self.process = CONTEXT.Process(
            target=small.run_apart, args=(self._out, flags, function, *arguments)
        )
        self.process.start()

    def send_signal(self, number):
        os.kill(self.process.pid, number)

    def wait(self, *, timeout=60):
        """The exit code, and what it wrote to stdout and to stderr."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"still runs after {timeout} s"
        out, error = (pathlib.Path(self._out + end).read_text() for end in ("", ".error"))
        return self.process.exitcode, out, error


@contextlib.contextmanager
def start(run, *arguments, function=small.main, present=2, port=None):
    """The processes of a run of two, of which ``present`` are started; none survives the block."""
    address = f"localhost:{port or free_port()}"
    children = [
        Child(function, f"{address},2,{index}", str(run), *arguments, folder=run.parent)
        for index in range(present)
    ]
    try:
        yield children
    finally:
        for child in children:
            child.process.kill()
            child.process.join()


def wait_for_exit(child):
    """The last line that a process wrote, after it has ended well."""
    code, out, error = child.wait()
    assert code == 0, error[-3000:]
    return json.loads(out.splitlines()[-1])


def wait_for_step(run, step, *, timeout=60):
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if any(line["step"] >= step for line in metrics(run)):
            return
        time.sleep(0.05)
    raise TimeoutError(f"step {step} was not reached")


def metrics(run):
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def checkpoints(run):
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())


def test_two_processes_give_the_same_run_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", small.SPLIT)
    run = tmp_path / "run"
    with start(run, 20, "") as children:
        first, second = (wait_for_exit(child) for child in children)
    alone = small.losses(devices=1, steps=30)
    listener = small.Losses()
    eight = small.trainer(fsdp=2, steps=20, callbacks=[listener], **small.evaluation())
    metrics_of_eight, together = eight.fit().metrics, listener.values
    np.testing.assert_allclose(first["losses"], together, rtol=1e-5)
    assert first["metrics"] == pytest.approx(metrics_of_eight, rel=1e-5)
    np.testing.assert_allclose(first["losses"], alone[:20], rtol=1e-5)
    # Process 0 alone listens and writes, and wrote each step once.
    assert second["losses"] == []
    assert second["step"] == first["step"] == 20
    assert second["metrics"] == first["metrics"]
    written = [line["step"] for line in metrics(run) if line["kind"] == "train"]
    assert written == list(range(1, 21))
    assert len(list((run / "tensorboard").iterdir())) == 1
    # Saved by two, continued by one with half the devices.
    assert resume(run, 30, devices=2) == pytest.approx(alone[20:], rel=1e-5)


def resume(run, steps, *, devices):
    """The losses of this process, as it continues a run."""
    listener = small.Losses()
    trainer = small.trainer(
        run=run, steps=steps, devices=devices, callbacks=[listener], **small.evaluation()
    )
    trainer.restore()
    assert trainer.fit().step == steps
    return listener.values


def test_a_killed_sparse_run_resumes_in_one_process_to_the_same_numbers(tmp_path):
    """Two processes with two devices each are killed; one with four goes on."""
    run = tmp_path / "run"
    with start(run, function=small.train_sparse) as (first, second):
        code, _, said = first.wait(timeout=300)
        assert code == 128 + signal.SIGKILL, said[-3000:]
        second.send_signal(signal.SIGKILL)
        second.wait()
    assert checkpoints(run)[-1] == 4
    losses = small.Losses()
    undisturbed = small.sparse_trainer(callbacks=[losses], devices=4)
    expected = undisturbed.fit().metrics
    resumed_losses = small.Losses()
    resumed = small.sparse_trainer(callbacks=[resumed_losses], run=run, devices=4)
    assert resumed.restore() == 4
    metrics_of_resumed = resumed.fit().metrics
    assert resumed_losses.values == pytest.approx(losses.values[4:], rel=1e-5)
    assert metrics_of_resumed == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for mine, other in zip(
        jax.tree.leaves(resumed.state), jax.tree.leaves(undisturbed.state), strict=True
    ):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)


def test_no_process_holds_all_of_a_large_array(tmp_path):
    with start(tmp_path / "run", function=small.hold_parts) as children:
        found = [wait_for_exit(child) for child in children]
    for one in found:
        at_the_start, trained, restored = one["held"]
        # Two kernels, each with two moments, half of each in either process.
        assert at_the_start == trained == restored == [0.5] * 6
        assert one["is_same"]


def test_a_signal_to_one_process_stops_both_at_the_same_step(tmp_path):
    run = tmp_path / "run"
    with start(run, 1_000_000, "") as children:
        wait_for_step(run, 20)
        children[1].send_signal(signal.SIGTERM)
        first, second = (wait_for_exit(child) for child in children)
    assert first["step"] == second["step"] >= 20
    assert first["reason"] == second["reason"]
    assert "asked to stop" in first["reason"]
    assert checkpoints(run)[-1] == first["step"]


def test_ctrl_c_in_one_process_reaches_all(monkeypatch):
    """JAX listens to SIGTERM only, so Ctrl-C is passed on as one; else the others would hang."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
    try:
        with preemption.listen_for_signals() as asked:
            signal.raise_signal(signal.SIGINT)
            assert heard == ["SIGTERM"]
            assert asked.at(1) is None
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("victim", [1, 0])
def test_a_process_that_loses_its_peer_says_how_to_resume(tmp_path, victim):
    run = tmp_path / "run"
    with start(run, 1_000_000, "short heartbeats") as children:
        wait_for_step(run, 25)
        children[victim].send_signal(signal.SIGKILL)
        code, _, said = children[1 - victim].wait()
    assert code == distributed.ABORTED, said[-3000:]
    assert "a peer was lost" in said
    assert f"`constrainx resume {run}`" in said
    before = checkpoints(run)[-1]
    if victim == 1:
        assert len(resume(run, before + 5, devices=2)) == 5


def test_peers_that_do_not_fit_together_are_refused_by_all(tmp_path):
    with start(tmp_path / "run", 1, "misfits") as children:
        first, second = (wait_for_exit(child) for child in children)
    assert (
        "process 1 was started with other settings: seed is 1 there and 0 in process 0" in first[0]
    )
    assert first[0] == second[0]
    for number, said in ((1, "process 1 cannot write to the run folder"), (2, "does not see what")):
        assert said in first[number]
        assert said in second[number]
    assert not list(tmp_path.glob("*/.peer-*"))
    assert not list(tmp_path.glob("*/checkpoints"))


def test_peers_that_never_come_are_not_waited_for_long(tmp_path):
    with start(tmp_path / "run", 20, "impatient", present=1) as (child,):
        code, _, error = child.wait()
    assert code == distributed.ABORTED
    assert "did not find each other within 2 s. Start all 2 processes at localhost:" in error
    assert "a peer was lost" not in error


def test_a_signal_ends_the_wait_for_peers_with_a_sentence(tmp_path):
    port = free_port()
    with start(tmp_path / "run", 20, "", present=1, port=port) as (child,):
        wait_for_port(port)
        child.send_signal(signal.SIGTERM)
        code, _, error = child.wait()
    assert code == 128 + signal.SIGTERM
    assert "ended by SIGTERM while waiting for the other processes" in error


def wait_for_port(port, *, timeout=60):
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port)):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens at {port}")


def test_the_coordinator_listens_at_its_own_address_alone():
    # TEST-NET-1: an address that no machine has.
    with pytest.raises(distributed.DistributedError, match=r"cannot listen at 192.0.2.1:1234"):
        distributed.join("192.0.2.1:1234,2,0")


@pytest.mark.parametrize(
    "spec",
    ["", "Auto", "10.0.0.1,2,0", "10.0.0.1:1234", "10.0.0.1:1234,2,2", ":1234,2,0", "h:x,2,0"],
)
def test_a_malformed_spec_is_refused(spec):
    for function in (distributed.join, distributed.supervise(spec).__enter__):
        arguments = (spec,) if function is distributed.join else ()
        with pytest.raises(ValueError, match=r"`auto` or `HOST:PORT,PROCESSES,INDEX`.*got"):
            function(*arguments)


def test_auto_without_a_cluster_says_what_to_do(tmp_path):
    child = Child(small.join_cluster, folder=tmp_path)
    code, _, error = child.wait()
    assert code == 1
    assert "found no SLURM, Open MPI, Kubernetes or Cloud TPU" in error
