"""The revision of the code, also in a repository that somebody else has prepared."""

import os
import shutil
import subprocess

import pytest

from constrainx.runtime._revision import read_revision

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit, which is the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    git("init", "--quiet")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "-m", "one")
    return tmp_path


def git(*arguments):
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def test_the_revision_says_whether_there_are_changes(repository):
    commit = git("rev-parse", "HEAD").strip()
    assert commit.startswith(read_revision())
    (repository / "file").write_text("two")
    assert read_revision().endswith("+")


def test_outside_of_a_repository_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert read_revision() is None


@pytest.mark.parametrize("driver", ["plain", "with=equals", "with.dot"])
@pytest.mark.parametrize("kind", ["clean", "process"])
def test_filters_of_a_repository_do_not_run(repository, driver, kind):
    (repository / ".gitattributes").write_text(f"file filter={driver}\n")
    git("config", f"filter.{driver}.{kind}", f"touch {repository / 'ran'}; cat")
    git("config", f"filter.{driver}.required", "true")
    (repository / "file").write_text("two")
    assert read_revision().endswith("+")
    assert not (repository / "ran").exists()


def test_hooks_and_monitors_of_a_repository_do_not_run(repository):
    program = repository / "program"
    program.write_text(f"#!/bin/sh\ntouch {repository / 'ran'}\n")
    program.chmod(0o755)
    git("config", "core.fsmonitor", str(program))
    hook = repository / ".git/hooks/post-index-change"
    hook.parent.mkdir(exist_ok=True)
    shutil.copy(program, hook)
    os.utime(repository / "file", (1, 1))  # so that the index is written anew
    assert read_revision() is not None
    assert not (repository / "ran").exists()
