"""Transforms of batches against references that change one example at a time."""

import numpy as np
import pytest

import constrainx as cx
from constrainx.data import transforms as t

GENERATOR = np.random.default_rng(0)
EXAMPLES = 11
PIXELS = GENERATOR.integers(0, 256, size=(EXAMPLES, 6, 5, 3)).astype(np.uint8)
CLASSES = np.arange(EXAMPLES, dtype=np.int32) % 4
SEED = 3


def split_mix(seed, epoch, example, number, count):
    """The uniform numbers of one example, with Python's integers."""
    mask = 2**64 - 1

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    step = 0x9E3779B97F4A7C15
    key = mix((seed + step) & mask) ^ epoch
    key = mix((key + step) & mask) ^ example
    key = mix((key + step) & mask)
    key = mix(((key ^ number) + step) & mask)
    return [(mix((key + (i + 1) * step) & mask) >> 11) / 2**53 for i in range(count)]


def make(*transforms, pixels=PIXELS, batch=4, **options):
    tree = {"x": pixels, "y": CLASSES, "number": np.arange(len(pixels), dtype=np.int32)}
    return cx.data.arrays(tree, batch=batch, seed=SEED, transforms=list(transforms), **options)


def take(data, steps, *, start=0, process=0, processes=1):
    batches = data.from_step(start, process=process, processes=processes)
    parts = [next(batches) for _ in range(steps)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def check_against(transform, reference, count, *, steps=6, pixels=PIXELS, **tolerances):
    """Compares each example of two epochs with `reference(image, numbers)`."""
    found = take(make(transform, pixels=pixels), steps)
    for position in range(4 * steps):
        example = found["number"][position]
        numbers = split_mix(SEED, position // EXAMPLES, int(example), 0, count)
        wanted = reference(pixels[example], numbers)
        assert found["x"][position].dtype == wanted.dtype
        np.testing.assert_allclose(found["x"][position], wanted, **tolerances)


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_random_crop(mode):
    def crop(image, numbers):
        wide = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode)
        top, left = (int(number * 5) for number in numbers)
        return wide[top : top + 6, left : left + 5]

    check_against(t.RandomCrop(2, mode=mode), crop, 2)


def test_random_flip():
    def flip(image, numbers):
        return np.fliplr(image) if numbers[0] < 0.3 else image

    check_against(t.RandomFlip(0.3), flip, 1)


@pytest.mark.parametrize("pixels", [PIXELS, (PIXELS / 255).astype(np.float32)], ids=["u8", "f32"])
def test_normalise(pixels):
    mean, deviation = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)

    def normalise(image, numbers):
        unit = image / 255 if image.dtype == np.uint8 else image
        return ((unit - np.array(mean)) / np.array(deviation)).astype(np.float32)

    transform = t.Normalise(mean, deviation)
    check_against(transform, normalise, 0, pixels=pixels, rtol=1e-5, atol=1e-6)
    batch = next(make(transform, pixels=pixels).once(batch=4))
    np.testing.assert_allclose(batch["x"][1], normalise(pixels[1], []), rtol=1e-5, atol=1e-6)


def test_numbers_are_uniform_and_of_their_own():
    draws = t.Draws(seed=0, epochs=np.repeat([0, 1], 500), examples=np.tile(np.arange(500), 2))
    numbers = np.concatenate([draws.uniform(20), draws.fold_in(1).uniform(20)], axis=1)
    assert len(np.unique(numbers)) == numbers.size
    assert 0 <= numbers.min() < 1e-3 < 1 - 1e-3 < numbers.max() < 1
    # 40,000 numbers: within four standard errors of what uniform ones have.
    assert abs(numbers.mean() - 0.5) < 4 / np.sqrt(12 * numbers.size)
    correlations = np.corrcoef(numbers.T) - np.eye(40)
    assert np.abs(correlations).max() < 5 / np.sqrt(1000)


AUGMENTATION = (t.RandomCrop(1), t.RandomFlip(), t.Normalise((0.5,) * 3, (0.2,) * 3))


@pytest.mark.parametrize("shuffle", [True, False])
def test_images_do_not_depend_on_processes_steps_or_batches(shuffle):
    data = make(*AUGMENTATION, shuffle=shuffle)
    whole = take(data, 6)
    late = take(data, 3, start=3)
    for name, values in whole.items():
        np.testing.assert_array_equal(late[name], values[12:])
        for processes in (2, 4):
            parts = [take(data, 6, process=p, processes=processes)[name] for p in range(processes)]
            rows = [part.reshape(6, 4 // processes, *part.shape[1:]) for part in parts]
            np.testing.assert_array_equal(
                np.concatenate(rows, axis=1).reshape(values.shape), values
            )
        other = take(make(*AUGMENTATION, shuffle=shuffle, batch=3), 8)[name]
        np.testing.assert_array_equal(other, values)
    assert len(np.unique(whole["x"][:11].reshape(11, -1), axis=0)) == 11


def test_an_example_changes_with_the_epoch_and_not_with_the_order():
    shuffled, in_order = (take(make(*AUGMENTATION, shuffle=s, batch=11), 2) for s in (True, False))
    for epoch in (slice(0, 11), slice(11, 22)):
        order = np.argsort(shuffled["number"][epoch])
        np.testing.assert_array_equal(shuffled["x"][epoch][order], in_order["x"][epoch])
    assert not np.array_equal(in_order["x"][:11], in_order["x"][11:])


def test_once_leaves_out_what_is_random():
    data = make(t.RandomCrop(2), t.RandomFlip())
    found = np.concatenate([batch["x"] for batch in data.once(batch=4)])
    np.testing.assert_array_equal(found[:EXAMPLES], PIXELS)


def shorten(batch, draws):
    return {name: value[1:] for name, value in batch.items()}


class Shorter(t.Transform):
    def apply(self, batch, draws):
        return shorten(batch, draws)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: t.RandomCrop(-1), "whole number of pixels"),
        (lambda: t.RandomCrop(2, mode="wrap"), "mode"),
        (lambda: t.RandomFlip(1.5), "from 0 to 1, got 1.5"),
        (lambda: t.Normalise((0.5,), (0.0,)), "positive standard deviation"),
        (lambda: take(make(t.RandomFlip(images="X")), 1), "which has 'number', 'x', 'y'"),
        (lambda: take(make(t.RandomCrop(5, mode="reflect")), 1), "more than 5 pixels"),
        (lambda: take(make(t.Normalise((0.5,), (0.1,))), 1), "1 channels"),
        (lambda: take(make(t.RandomFlip(images="y")), 1), r"got shape \(4,\)"),
        (lambda: take(make(Shorter()), 1), "Shorter must return as many examples"),
        (lambda: make(np.flip), "transforms of batches"),
        (lambda: make(t.RandomFlip(), augment=shorten), "pass one of them"),
    ],
    ids=range(11),
)
def test_mistakes_are_errors(build, message):
    with pytest.raises(cx.UserError, match=message):
        build()
