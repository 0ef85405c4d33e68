"""A trace of chosen steps, and the regions that a step is divided into."""

import dataclasses
import gzip
import json
import re

import pytest

import constrainx as cx
from constrainx.runtime import Profile
from tests.distributed import small

REGIONS = {"loss", "residual", "linearise", "solve", "update"}


def find_regions(trainer):
    names = re.findall(r'loc\("([^"]*)"', trainer.lower().as_text(debug_info=True))
    words = {word for name in names for word in re.findall(r"\w+", name)}
    return words & REGIONS


def test_a_step_is_divided_into_regions():
    assert find_regions(small.trainer(devices=1)) == REGIONS
    assert find_regions(small.trainer(devices=1, method="none")) == {"loss", "update"}


def test_chosen_steps_are_traced(tmp_path):
    trainer = small.trainer(devices=1, steps=5)
    profile = Profile(first=3, last=4, folder=tmp_path)
    trainer.logging = dataclasses.replace(trainer.logging, profile=profile)
    trainer.fit()
    (file,) = tmp_path.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = {event["args"]["step_num"] for event in events if event.get("name") == "step"}
    assert steps == {"3", "4"}
    assert [*tmp_path.glob("plugins/profile/*/perfetto_trace.json.gz")]


def test_steps_are_written_as_a_number_or_a_range(tmp_path):
    one = Profile.of_steps("7", folder=tmp_path)
    assert (one.first, one.last) == (7, 7)
    with pytest.raises(ValueError, match="written as 20 or as 20-24, got '5,6'"):
        Profile.of_steps("5,6", folder=tmp_path)
    with pytest.raises(cx.errors.ArgumentError, match="got 5 and 4"):
        Profile.of_steps("5-4", folder=tmp_path)
