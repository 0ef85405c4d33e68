"""Manifests have the form that their readers publish, and say what the run needs."""

import pathlib

import pytest
import yaml

from constrainx.errors import ArgumentError
from constrainx.launch import Kubernetes, SkyPilot
from constrainx.runtime import ABORTED, STOPPED
from tests.launch.test_job import make_job

# The first in which all fields are in use by default, and a recent one.
VERSIONS = ("1.31", "1.34")


def write_kubernetes(job=None, **settings):
    written = Kubernetes(container_image="registry/constrainx:1", **settings)
    return list(yaml.safe_load_all(written.write(job or make_job())))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"namespace": "team", "time": "7-00:00:00", "cpus": 96, "memory": "512Gi"},
    ],
)
def test_kubernetes_accepts_every_object(version, settings):
    """Strictly: a field that it does not know is an error."""
    from kubernetes_validate import validate

    documents = write_kubernetes(**settings)
    kinds = [document["kind"] for document in documents]
    assert kinds == ["ServiceAccount", "Role", "RoleBinding", "Service", "Job"]
    for document in documents:
        validate(document, version, strict=True)
        assert document["metadata"].get("namespace") == settings.get("namespace")


def test_a_field_that_kubernetes_does_not_know_is_noticed():
    """The test above would pass if nothing were ever refused."""
    from kubernetes_validate import ValidationError, validate

    *_, job = write_kubernetes()
    job["spec"]["podFailurePolicies"] = job["spec"].pop("podFailurePolicy")
    with pytest.raises(ValidationError, match="podFailurePolicies"):
        validate(job, VERSIONS[0], strict=True)


def test_pods_find_each_other_and_are_replaced_until_the_run_has_ended():
    account, _, binding, service, job = write_kubernetes(time="1:00:00", notice=60)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 8
    assert spec["activeDeadlineSeconds"] == 3600
    # JAX looks for the first pod at NAME-0.SUBDOMAIN, for which it asks with the pod's account.
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert binding["subjects"][0]["name"] == account["metadata"]["name"]
    # A policy for failures is only allowed if pods are not restarted in place.
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 60
    codes = [rule.get("onExitCodes") for rule in spec["podFailurePolicy"]["rules"]]
    assert {STOPPED, ABORTED} <= {*codes[1]["values"]}
    assert all(rule["action"] == "Ignore" for rule in spec["podFailurePolicy"]["rules"])
    (container,) = pod["containers"]
    assert container["command"] == make_job().train(distributed="auto")
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}


def test_pods_without_gpus_ask_for_none():
    *_, job = write_kubernetes(make_job(gpus=0), cpus=4)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"cpu": 4}}


def test_the_run_must_be_on_the_shared_volume():
    with pytest.raises(ArgumentError, match=r"`--run runs/a` must be on the shared volume"):
        write_kubernetes(make_job(run=pathlib.Path("runs/a")))
    kubernetes = Kubernetes(container_image="c", mount="/data")
    assert kubernetes.place(pathlib.Path("runs/a/b")) == pathlib.Path("/data/a/b")


def test_a_task_for_skypilot():
    """Its keys were compared with SkyPilot's own schema, which is too large to install here."""
    job = make_job(recipe="mine.py", options=("--title", "it's $HOME"))
    text = SkyPilot(volume="shared", infra="gcp", container_image="c:1").write(job)
    task = yaml.safe_load(text)
    assert task["num_nodes"] == 8
    assert task["workdir"] == "."
    assert task["volumes"] == {"/runs": "shared"}
    assert "setup" not in task
    resources = task["resources"]
    assert resources["accelerators"] == "H100:8"
    assert resources["image_id"] == "docker:c:1"
    assert resources["use_spot"] is True
    assert resources["job_recovery"]["recover_on_exit_codes"] == [STOPPED, ABORTED]


def test_the_script_for_skypilot_gives_every_node_its_place(tmp_path):
    """Run by bash with the variables that SkyPilot sets, and a program that shows its arguments."""
    import subprocess

    job = make_job(options=("--title", "it's $HOME"))
    script = yaml.safe_load(SkyPilot(volume="shared").write(job))["run"]
    shown = tmp_path / "constrainx"
    shown.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    shown.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
    }
    ended = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    said = ended.stdout.splitlines()
    assert said[:4] == ["train", "o3-inertia", "--title", "it's $HOME"]
    assert said[-2:] == ["--distributed", "10.0.0.1:12621,2,1"]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Kubernetes, {"container_image": "a\nb"}),
        (Kubernetes, {"container_image": "a", "claim": "b c"}),
        (SkyPilot, {"volume": "a: b"}),
    ],
)
def test_values_that_are_no_words_are_refused(kind, settings):
    with pytest.raises(ArgumentError, match="must be one word"):
        kind(**settings)
