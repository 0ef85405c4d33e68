"""`constrainx launch`: what it writes, what it refuses, and that files are submitted."""

import pathlib
import re
import shlex
import subprocess

import pytest
import yaml

import constrainx as package

SIZE = ("--size", "smoke", "--save-every", "10")
CPUS = ("--gpus-per-node", "0")
PAGE = pathlib.Path(package.__file__).parent.parent / "docs" / "distributed.md"


def test_a_script_for_slurm_is_written_and_not_submitted(constrainx, tmp_path):
    words = ("--nodes", 4, "--min-nodes", 2, "--partition", "gpu", "--time", "8:00:00")
    code, text = constrainx("launch", "slurm", "o3-inertia", *words, *SIZE, "--rows=4")
    assert (code, text) == (0, "Wrote jobs/o3-inertia.sh. Submit it: sbatch jobs/o3-inertia.sh\n")
    script = (tmp_path / "jobs" / "o3-inertia.sh").read_text()
    assert "#SBATCH --nodes=2-4\n" in script
    assert "#SBATCH --partition=gpu\n" in script
    assert "for nodes in 4 2; do" in script
    train = (
        "constrainx train o3-inertia --size smoke --save-every 10 --rows=4 --run runs/o3-inertia/"
    )
    assert train in script
    subprocess.run(["bash", "-n", tmp_path / "jobs" / "o3-inertia.sh"], check=True)


@pytest.mark.parametrize(
    ("scheduler", "shown"),
    [("slurm", r"^```sh\n(#SBATCH.*?)^```"), ("kubernetes", r"^```yaml\n(spec:.*?)^```")],
)
def test_the_page_about_many_machines_shows_what_is_written(constrainx, tmp_path, scheduler, shown):
    page = PAGE.read_text()
    command = re.search(rf"^constrainx (launch {scheduler} .*)$", page, re.MULTILINE)[1]
    assert constrainx(*shlex.split(command))[0] == 0
    (file,) = (tmp_path / "jobs").iterdir()
    excerpt = re.search(shown, page, re.MULTILINE | re.DOTALL)[1]
    written = file.read_text()
    # The check of the environment is left out on the page.
    for part in excerpt.split("\n\n"):
        assert part.strip() in written, part


def test_own_recipes_are_launched_by_their_file(constrainx, tmp_path):
    assert constrainx("new", "mine.py")[0] == 0
    words = ("--container-image", "registry/mine:1", *CPUS, "--run", "/runs/mine", "--wandb")
    code, text = constrainx("launch", "kubernetes", "mine.py", *words, "--out", "job.yaml")
    assert code == 0, text
    assert "Note: the run is saved only at its end" in text
    assert "kubectl apply -f job.yaml" in text
    *_, job = yaml.safe_load_all((tmp_path / "job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][:6] == [
        "constrainx",
        "train",
        "mine.py",
        "--wandb",
        "--run",
        "/runs/mine",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slrum", "o3-inertia"], "Did you mean 'slurm'"),
        (["slurm"], "needs RECIPE as its first argument"),
        (["slurm", "o3-inertai"], "Did you mean 'o3-inertia'"),
        (["slurm", "o3-inertia", "--widht", "3"], "Did you mean '--width'"),
        (["slurm", "o3-inertia", "--partitoin", "gpu"], "Did you mean '--partition'"),
        (["slurm", "o3-inertia", "--method", "nulspace"], "Did you mean 'nullspace'"),
        (["slurm", "o3-inertia", "--devices", "4"], "has no option `--devices`"),
        (["slurm", "o3-inertia", "--nodes", "3"], "use 2 or 4 nodes"),
        (["slurm", "o3-inertia", "--time", "soon"], "such as 24:00:00"),
        (["slurm", "o3-inertia", "--time", "1"], "longer than `--notice 120`"),
        (["slurm", "o3-inertia", "--account", "me --nodelist=a"], "must be one word"),
        (["slurm", "o3-inertia", "--out", "/proc/nowhere/job.sh"], "cannot be written"),
    ],
)
def test_mistakes_are_refused_when_the_file_is_written(constrainx, tmp_path, arguments, message):
    code, text = constrainx("launch", *arguments)
    assert code == 1
    assert message in text
    assert len(text.strip().splitlines()) == 1
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize(
    ("words", "tool"),
    [
        (("slurm",), "sbatch"),
        (("kubernetes", "--container-image", "a"), "kubectl"),
        (("skypilot", "--volume", "a"), "sky"),
    ],
)
def test_without_the_scheduler_it_says_what_to_install(
    constrainx, tmp_path, monkeypatch, words, tool
):
    monkeypatch.setenv("PATH", str(tmp_path))
    scheduler, *more = words
    code, text = constrainx("launch", scheduler, "o3-inertia", *more, *SIZE, "--submit")
    assert code == 1
    assert f"`{tool}` is not installed here" in text
    assert len(list((tmp_path / "jobs").iterdir())) == 1


def test_a_submission_that_is_refused_is_one_sentence(constrainx, tmp_path, monkeypatch):
    refusing = tmp_path / "sbatch"
    refusing.write_text("#!/bin/sh\nexit 3\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    code, text = constrainx("launch", "slurm", "o3-inertia", *SIZE, "--submit")
    assert code == 1
    assert "`sbatch jobs/o3-inertia.sh` failed with code 3" in text
