"""Batches are a function of the step, whatever the number of processes."""

import contextlib
import itertools
import threading
import time

import jax
import numpy as np
import pytest

from constrainx import data


def take(batches, count, step=0, **options):
    with contextlib.closing(batches.from_step(step, **options)) as iterator:
        return list(itertools.islice(iterator, count))


def join(parts):
    """What the processes were given, put together in their order."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def assert_same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def add_noise(batch, rng):
    return {**batch, "x": batch["x"] + rng.normal(size=batch["x"].shape)}


def draw(rng, count):
    return {"x": rng.normal(size=(count, 2)), "y": rng.integers(10, size=count)}


def count_up():
    for step in itertools.count():
        yield {"x": np.arange(8) + 8 * step}


X, Y = np.arange(60.0).reshape(30, 2), np.arange(30)
KINDS = {
    "arrays": data.arrays({"x": X, "y": Y}, batch=8, seed=3),
    "in order": data.arrays({"x": X, "y": Y}, batch=8, shuffle=False),
    "small": data.arrays({"x": X[:3], "y": Y[:3]}, batch=8),
    "augmented": data.arrays({"x": X, "y": Y}, batch=8, augment=add_noise),
    "generated": data.from_function(draw, batch=8),
    "iterated": data.from_iterable(count_up, batch=8),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_the_global_batch_does_not_depend_on_the_number_of_processes(kind, processes):
    whole = take(KINDS[kind], 6)
    parts = [take(KINDS[kind], 6, process=p, processes=processes) for p in range(processes)]
    for wanted, found in zip(whole, zip(*parts, strict=True), strict=True):
        assert all(len(leaf) == 8 // processes for leaf in jax.tree.leaves(found))
        assert_same(join(found), wanted)


@every_kind
@pytest.mark.parametrize("step", [1, 4, 11])
def test_starting_at_a_later_step_continues_the_same_stream(kind, step):
    assert_same(take(KINDS[kind], 3, step), take(KINDS[kind], step + 3)[step:])


@every_kind
def test_a_batch_must_divide_among_the_processes(kind):
    with pytest.raises(ValueError, match=r"multiple of the 3 processes.* got 8.* 6 or 9"):
        KINDS[kind].from_step(0, processes=3)
    with pytest.raises(ValueError, match=r"`process` must be .*process 2 of 2"):
        KINDS[kind].from_step(0, process=2, processes=2)
    with pytest.raises(ValueError, match=r"`step` must be .* got -1"):
        KINDS[kind].from_step(-1)


def test_every_example_comes_once_per_epoch_and_in_a_new_order():
    stream = np.concatenate([batch["y"] for batch in take(KINDS["arrays"], 15)])
    epochs = stream.reshape(4, 30)
    for epoch in epochs:
        assert sorted(epoch) == list(range(30))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert list(epochs[0]) != list(range(30))


def test_parts_of_an_example_stay_together():
    for batch in take(KINDS["arrays"], 5):
        np.testing.assert_array_equal(batch["x"], X[batch["y"]])


def test_a_batch_larger_than_the_data_wraps_around():
    stream = np.concatenate([batch["y"] for batch in take(KINDS["small"], 3)])
    assert [sorted(epoch) for epoch in stream.reshape(8, 3)] == [[0, 1, 2]] * 8


def test_the_seed_determines_order_and_augmentation():
    def first(seed, augment=None):
        return take(data.arrays({"x": X, "y": Y}, batch=8, seed=seed, augment=augment), 1)[0]

    assert_same(first(5), first(5))
    assert list(first(5)["y"]) != list(first(6)["y"])
    noise = [first(seed, add_noise)["x"] - first(seed)["x"] for seed in (5, 5, 6)]
    np.testing.assert_array_equal(noise[0], noise[1])
    assert np.abs(noise[0] - noise[2]).max() > 0.1


def test_augmentation_is_new_at_each_step_and_row():
    plain = data.arrays({"x": np.zeros((4, 2)), "y": np.zeros(4)}, batch=4, augment=add_noise)
    noise = np.concatenate([batch["x"].ravel() for batch in take(plain, 10)])
    assert len(set(noise)) == 80


def test_batches_can_be_changed_without_changing_the_data():
    source = np.arange(4.0)
    plain = data.arrays({"x": source}, batch=4, shuffle=False)
    take(plain, 1)[0]["x"][:] = 7
    assert list(source) == [0, 1, 2, 3]


def test_arrays_may_be_any_pytree():
    pair = data.arrays((X, {"labels": [Y]}), batch=8)
    x, rest = take(pair, 1)[0]
    np.testing.assert_array_equal(x, X[rest["labels"][0]])
    with pytest.raises(TypeError, match=r"must be dictionaries, got tuple"):
        pair.once(batch=8)


@pytest.mark.parametrize("batch", [1, 4, 7, 30, 64])
@pytest.mark.parametrize("kind", ["arrays", "augmented"])
def test_one_pass_has_each_example_once(kind, batch):
    batches = list(KINDS[kind].once(batch=batch))
    assert len(batches) == -(-30 // batch)
    assert all(len(leaf) == batch for leaf in jax.tree.leaves(batches))
    whole = join(batches)
    assert whole["mask"].dtype == np.float32
    real = whole["mask"] == 1
    np.testing.assert_array_equal(whole["y"][real], Y)
    np.testing.assert_array_equal(whole["x"][real], X)
    assert not whole["mask"][~real].any()


@pytest.mark.parametrize("processes", [2, 4])
def test_one_pass_is_shared_by_the_processes(processes):
    # The last batch has two examples: some processes have nothing but filling.
    whole = list(KINDS["arrays"].once(batch=28))
    options = {"batch": 28, "processes": processes}
    parts = [list(KINDS["arrays"].once(process=p, **options)) for p in range(processes)]
    for wanted, found in zip(whole, zip(*parts, strict=True), strict=True):
        assert_same(join(found), wanted)
    assert not parts[-1][-1]["mask"].any()


def test_once_refuses_examples_that_cannot_hold_a_mask():
    with pytest.raises(ValueError, match=r"have one already"):
        data.arrays({"x": X, "mask": Y}, batch=8).once(batch=8)
    with pytest.raises(ValueError, match=r"multiple of the 4 processes"):
        KINDS["arrays"].once(batch=30, processes=4)


def test_examples_are_counted():
    assert KINDS["arrays"].examples == 30
    assert KINDS["generated"].examples is None
    assert KINDS["arrays"].batch == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": {"x": X, "y": Y[:7]}}, r"share .* \['x'\]: 30, \['y'\]: 7"),
        ({"tree": {"x": [1, 2]}}, r"\['x'\]\[0\] is the scalar 1"),
        ({"tree": {}}, "at least one array"),
        ({"tree": {"x": X[:0]}}, "at least one example"),
        ({"batch": 0}, "`batch` must be .* got 0"),
        ({"batch": 2.5}, "`batch` must be .* got 2.5"),
        ({"seed": -1}, "`seed` must be .* got -1"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    options = {"tree": {"x": X}, "batch": 8, **options}
    with pytest.raises(ValueError, match=message):
        data.arrays(options.pop("tree"), **options)


def test_augmentation_must_keep_the_size():
    smaller = data.arrays({"x": X}, batch=8, augment=lambda batch, rng: {"x": batch["x"][:5]})
    with pytest.raises(ValueError, match=r"as many examples as it was given, 8, got 5"):
        take(smaller, 1)


def test_arrays_in_memory_cost_microseconds():
    """A tenth of a millisecond is what a small network's step takes; one example at a time is 1 ms.

    The least of many is what the code costs; the rest is other people's work.
    """
    digits = np.zeros((60000, 64), np.float32)
    batches = data.arrays({"x": digits, "y": digits[:, 0]}, batch=128).from_step(0)
    next(batches)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        next(batches)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-4


def test_a_function_draws_new_examples_from_its_seed():
    batches = take(KINDS["generated"], 5)
    assert len(set(join(batches)["x"].ravel())) == 80
    other = take(data.from_function(draw, batch=8, seed=1), 1)[0]
    assert np.abs(other["x"] - batches[0]["x"]).max() > 0.1


def test_a_function_cannot_be_iterated_once_and_must_return_the_batch_size():
    with pytest.raises(TypeError, match=r"draws forever.*cx\.data\.arrays"):
        KINDS["generated"].once(batch=8)
    with pytest.raises(ValueError, match=r"asked for 8 examples and returned 3"):
        take(data.from_function(lambda rng, count: np.zeros(3), batch=8), 1)


def test_an_iterable_that_ends_too_early_is_an_error():
    def make():
        return ({"x": np.full(4, step)} for step in range(3))

    finite = data.from_iterable(make, batch=4)
    iterator = finite.from_step(1)
    assert [next(iterator)["x"][0] for _ in range(2)] == [1, 2]
    with pytest.raises(data.DataEndedError, match=r"ended after 3 batches, before step 3\."):
        next(iterator)
    with pytest.raises(data.DataEndedError, match=r"ended after 3 batches, before step 9\."):
        next(finite.from_step(9))
    with pytest.raises(TypeError, match=r"new iterable, got generator.*lambda: iterable"):
        data.from_iterable(make(), batch=4)
    with pytest.raises(ValueError, match=r"`batch` is 5, but .* yielded 4 examples at step 0"):
        take(data.from_iterable(make, batch=5), 1)


def test_one_pass_over_an_iterable():
    def make():
        yield {"x": np.arange(4)}
        yield {"x": np.arange(4, 6)}

    finite = data.from_iterable(make, batch=4)
    for batch in (4, 6):
        parts = [join(list(finite.once(batch=batch, process=p, processes=2))) for p in range(2)]
        kept = [x for part in parts for x in part["x"][part["mask"] == 1]]
        assert sorted(kept) == list(range(6))
        assert len(join(parts)["x"]) == 2 * batch
    with pytest.raises(ValueError, match=r"cannot hold the 4 examples"):
        next(finite.once(batch=3))


def test_closing_an_iterator_closes_what_it_reads():
    closed = []

    def make():
        try:
            yield from count_up()
        finally:
            closed.append(True)

    take(data.from_iterable(make, batch=8), 2)
    assert closed == [True]


def test_prefetching_keeps_the_order_and_ends():
    with contextlib.closing(data.prefetch(iter(range(100)), size=3)) as iterator:
        assert list(iterator) == list(range(100))
        assert list(iterator) == []


def test_prefetching_stays_ahead_by_its_size_and_no_more():
    made = []

    def numbers():
        for number in itertools.count():
            made.append(number)
            yield number

    with contextlib.closing(data.prefetch(numbers(), size=2)) as iterator:
        deadline = time.monotonic() + 10
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        # Two that are ready, and one more that waits for its place.
        assert made == [0, 1, 2]
        assert next(iterator) == 0


def test_prefetching_raises_an_error_in_place_of_its_item():
    def failing():
        yield 1
        raise KeyError("broken file")

    with contextlib.closing(data.prefetch(failing())) as iterator:
        assert next(iterator) == 1
        with pytest.raises(KeyError, match="broken file"):
            next(iterator)
        assert list(iterator) == []


@pytest.mark.parametrize("size", [1, 4])
def test_closing_ends_the_thread_and_the_iterator(size):
    closed = []

    def numbers():
        try:
            yield from itertools.count()
        finally:
            closed.append(True)

    before = threading.active_count()
    iterator = data.prefetch(numbers(), size=size)
    next(iterator)
    iterator.close()
    iterator.close()
    assert closed == [True]
    assert threading.active_count() == before
    assert list(iterator) == []


def test_dropping_an_iterator_ends_its_thread():
    before = threading.active_count()
    iterator = data.prefetch(itertools.count())
    next(iterator)
    del iterator
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_prefetching_refuses_wrong_arguments():
    with pytest.raises(ValueError, match=r"`size` must be .* got 0"):
        data.prefetch(iter([]), size=0)
    with pytest.raises(TypeError, match=r"got list.*iter\(\.\.\.\)"):
        data.prefetch([1, 2])
