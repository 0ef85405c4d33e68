"""What all schedulers share: on which numbers of nodes a job can run, and what it executes."""

import pathlib

import pytest

from constrainx.errors import ArgumentError
from constrainx.launch import Job
from constrainx.launch._duration import read_seconds


def make_job(**settings):
    return Job(
        **{
            "name": "inertia",
            "recipe": "o3-inertia",
            "options": ("--width", "64"),
            "run": pathlib.Path("/runs/inertia"),
            "nodes": 8,
            "gpus": 8,
            **settings,
        }
    )


def test_every_process_trains_the_recipe_and_resumes_by_itself():
    command = make_job().train(distributed="auto")
    assert command[:5] == ["constrainx", "train", "o3-inertia", "--width", "64"]
    assert {"--resume-if-possible", "--fail-if-stopped"} <= {*command}
    assert command[-2:] == ["--distributed", "auto"]


@pytest.mark.parametrize(
    ("settings", "least", "fitting"),
    [
        ({}, 6, [8, 7, 6]),
        ({"batch": 1024}, 1, [8, 4, 2, 1]),
        ({"batch": 1024}, 3, [8, 4]),
        ({"batch": 1024, "fsdp": 32}, 1, [8, 4]),
        ({"nodes": 6, "gpus": 0, "batch": 12}, 2, [6, 4, 3, 2]),
    ],
)
def test_nodes_fit_if_their_devices_divide_the_batch(settings, least, fitting):
    assert make_job(**settings).list_nodes(least) == fitting


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 3, "batch": 1024}, "3 nodes have 24 devices.*use 2 or 4 nodes"),
        ({"nodes": 8, "batch": 32}, "64 devices.*use 4 nodes"),
        ({"nodes": 1, "batch": 1024, "fsdp": 16}, "use 2 nodes"),
        ({"nodes": 1, "batch": 100}, "use another batch"),
        ({"nodes": 0}, "`--nodes` must be at least 1, got 0"),
        ({"gpus": -1}, "`--gpus-per-node` must be 0"),
        ({"name": "Inertia"}, "`--name Inertia` must be"),
        ({"name": "i" * 51}, "at most 50"),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(settings, message):
    with pytest.raises(ArgumentError, match=message):
        make_job(**settings)


@pytest.mark.parametrize("least", [0, 9])
def test_the_least_number_of_nodes_is_one_of_them(least):
    with pytest.raises(ArgumentError, match=r"between 1 and `--nodes 8`"):
        make_job().list_nodes(least)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("2:00:01", 7201),
        ("1-0", 86400),
        ("1-2:30", 95400),
        ("1-0:0:9", 86409),
    ],
)
def test_durations_are_read_as_by_slurm(text, seconds):
    assert read_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "1h", "1:2:3:4", "24:00:00\n#SBATCH --account=x"])
def test_other_durations_are_refused(text):
    with pytest.raises(ArgumentError, match=r"such as 24:00:00"):
        read_seconds(text)
