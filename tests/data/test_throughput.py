"""How fast batches come, and which stage takes the time."""

import contextlib
import dataclasses
import itertools

import grain
import jax
import numpy as np
import pytest

from constrainx import data
from constrainx.data import _stopwatch, _throughput, transforms
from constrainx.errors import ArgumentError

from .photographs import EXAMPLES


class Clock:
    """Time that passes only when somebody says so, in place of the module `time`."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (_stopwatch, _throughput):
        monkeypatch.setattr(module, "time", clock)
    # A thread would let time pass for the others.
    monkeypatch.setattr(_throughput, "prefetch", lambda batches: batches)
    return clock


@dataclasses.dataclass(frozen=True)
class Slow(transforms.Transform):
    clock: Clock
    seconds: float

    def apply(self, batch, draws):
        self.clock.wait(self.seconds)
        return batch


@dataclasses.dataclass(frozen=True)
class SlowMap(grain.transforms.Map):
    clock: Clock

    def map(self, element):
        self.clock.wait(0.25)
        return element


@dataclasses.dataclass(frozen=True)
class SlowRandomMap(grain.transforms.RandomMap):
    clock: Clock

    def random_map(self, element, rng):
        self.clock.wait(0.5)
        return element


def drop_name(element):
    return {"image": element["image"], "label": element["label"]}


def make_arrays(**options):
    arrays = {"x": np.ones((20, 4, 4, 1), np.float32), "y": np.arange(20, dtype=np.int32)}
    return data.arrays(arrays, batch=8, seed=3, **options)


def take(batches, count):
    with contextlib.closing(batches.from_step(2)) as iterator:
        return list(itertools.islice(iterator, count))


def assert_same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_the_time_of_arrays_goes_where_it_is_spent(clock):
    changes = [transforms.RandomFlip(), Slow(clock, 1.0), Slow(clock, 2.0)]
    found = data.measure_throughput(
        make_arrays(transforms=changes), seconds=14.0, place=lambda _: clock.wait(4.0)
    )
    # Batches take seven seconds, the first does not count.
    assert found.batches == 2
    assert found.rate == 8 / 7
    assert found.stages == {
        "reading": 0.0,
        "RandomFlip": 0.0,
        "Slow": 1 / 8,
        "Slow 2": 2 / 8,
        "placing": 4 / 8,
    }
    assert list(found.stages) == ["reading", "RandomFlip", "Slow", "Slow 2", "placing"]


def test_the_time_of_augment_is_that_of_the_function(clock):
    def augment(batch, rng):
        clock.wait(3.0)
        return batch

    found = data.measure_throughput(make_arrays(augment=augment), seconds=1.0)
    assert found.stages == {"reading": 0.0, "augment": 3 / 8, "placing": 0.0}


def test_examples_of_tfds_are_taken_apart(clock, photographs):
    changes = (
        drop_name,
        SlowMap(clock),
        SlowRandomMap(clock),
        SlowMap(clock),
        data.RandomPhotographCrop(4),
        Slow(clock, 1.0),
    )
    batches = data.tfds(
        "photographs", "train", batch=4, transforms=changes, data_dir=photographs, buffer=0
    )
    batches = dataclasses.replace(batches, source=SlowSource(batches.source, clock))
    found = data.measure_throughput(batches, seconds=1.0, place=lambda _: clock.wait(8.0))
    assert list(found.stages.items()) == [
        ("reading", 2.0),
        ("drop_name", 0.0),
        ("SlowMap", 0.25),
        ("SlowRandomMap", 0.5),
        ("SlowMap 2", 0.25),
        ("RandomPhotographCrop", 0.0),
        ("Slow", 0.25),
        ("batching", 0.0),
        ("placing", 2.0),
    ]
    assert found.rate == 4 / 21


@dataclasses.dataclass(frozen=True)
class SlowSource:
    source: object
    clock: Clock

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        self.clock.wait(2.0)
        return self.source[index]


@pytest.mark.parametrize("kind", ["function", "iterable"])
def test_data_that_cannot_be_taken_apart_is_all_reading(clock, kind):
    def draw(rng, count):
        clock.wait(2.0)
        return {"x": rng.normal(size=count)}

    drawn = data.from_function(draw, batch=4)
    batches = drawn
    if kind == "iterable":
        batches = data.from_iterable(lambda: drawn.from_step(0), batch=4)
    found = data.measure_throughput(batches, seconds=4.0)
    assert found == data.Throughput(2.0, 2, {"reading": 0.5, "placing": 0.0})


def test_batches_are_the_same_while_they_are_timed(photographs):
    watch = data.Stopwatch()
    changes = (
        data.RandomPhotographCrop(4),
        transforms.RandomFlip(),
        transforms.MixImages(EXAMPLES),
    )
    options = {"batch": 4, "transforms": changes, "data_dir": photographs}
    read_by_others = data.tfds("photographs", "train", workers=2, **options)
    # What other processes and threads do, the watch would not see.
    wanted = take(data.tfds("photographs", "train", **options), 4)
    assert_same(take(read_by_others.timed_by(watch), 4), wanted)
    assert {*watch.seconds} == {"reading", "RandomPhotographCrop", "RandomFlip", "MixImages"}
    crop = make_arrays(transforms=[transforms.RandomCrop(1), transforms.MixImages(20)])
    assert_same(take(crop.timed_by(watch), 4), take(crop, 4))
    shifted = make_arrays(augment=lambda batch, rng: {"x": batch["x"] + rng.normal()})
    assert_same(take(shifted.timed_by(watch), 4), take(shifted, 4))


def test_data_is_read_ahead_and_closed_after_that():
    """In real time, with the threads of training."""
    closed = []

    def make():
        try:
            while True:
                yield {"x": np.zeros(4, np.float32)}
        finally:
            closed.append(True)

    found = data.measure_throughput(data.from_iterable(make, batch=4), seconds=0.01)
    assert found.rate > 0
    assert closed == [True, True]
    assert data.measure_throughput(make_arrays(), seconds=1e-9).batches == 1


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_a_time_that_never_comes_is_refused(seconds):
    with pytest.raises(ArgumentError, match="`seconds` must be a positive number"):
        data.measure_throughput(make_arrays(), seconds=seconds)
