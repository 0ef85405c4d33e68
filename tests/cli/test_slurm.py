"""A job file of `constrainx launch slurm`, run by SLURM itself."""

import json
import os
import pathlib
import sys

import pytest

import constrainx as package
from constrainx.recipes.o3_inertia import O3Inertia
from tests.cli import slurm_cluster
from tests.cli.slurm_cluster import ask, wait_until

EPOCHS, STEPS = 20, 160
RECIPE = ("o3-inertia", "--size", "smoke", "--epochs", EPOCHS)
OFTEN = ("--save-every", 10, "--log-every", 1)
ONE_DEVICE = "--xla_force_host_platform_device_count=1"


@pytest.fixture
def cluster(monkeypatch):
    if not slurm_cluster.is_installed():
        pytest.skip("SLURM is not installed: apt-get install slurm-wlm")
    root = pathlib.Path(package.__file__).parent.parent
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(root))
    # As fast as in this process, but with one device for each.
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} {ONE_DEVICE}")
    # The names of these nodes are no addresses, as they are in a real cluster.
    (port,) = slurm_cluster.free_ports(1)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"localhost:{port}")
    with slurm_cluster.start_cluster(monkeypatch):
        yield


def test_a_job_joins_two_nodes_and_resumes_on_the_one_that_is_left(cluster, constrainx, tmp_path):
    """A node is taken away and the job is preempted; the numbers are those of one process."""
    nodes = ("--nodes", 2, "--min-nodes", 1, "--gpus-per-node", 0)
    code, text = constrainx("launch", "slurm", *RECIPE, *OFTEN, *nodes, "--run", "run", "--submit")
    assert code == 0, text
    wait_until(lambda: count_steps(tmp_path) >= 20, log=tmp_path)
    assert ask("squeue", "-h", "-o", "%T %D") == "RUNNING 2"
    job = ask("squeue", "-h", "-o", "%i")
    ask("scontrol", "update", "nodename=n1", "state=drain", "reason=taken")
    ask("scontrol", "requeue", job)
    wait_until(lambda: "JobState=COMPLETED" in ask("scontrol", "show", "job", job), log=tmp_path)

    log = (tmp_path / f"o3-inertia-{job}.log").read_text()
    assert "in 2 processes" in log
    assert ask("scontrol", "show", "job", job).count("Restarts=1") == 1
    events = [line["message"] for line in read_metrics(tmp_path) if line["kind"] == "event"]
    assert any("resumed from step" in event for event in events), events
    written = [line["step"] for line in read_metrics(tmp_path) if line["kind"] == "train"]
    assert sorted(set(written)) == list(range(1, STEPS + 1))
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    alone = O3Inertia(size="smoke", epochs=EPOCHS, devices=1)
    assert found["step"] == STEPS
    assert found["metrics"] == pytest.approx(alone.trainer(progress=False).fit().metrics, rel=1e-5)


def read_metrics(folder):
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def count_steps(folder):
    return max((line["step"] for line in read_metrics(folder)), default=0)
