"""Crops at another size, erased rectangles and mixtures, one example at a time."""

import math

import numpy as np
import pytest
import scipy.stats
from PIL import Image

import constrainx as cx
from constrainx.data import transforms as t
from tests.data.test_transforms import (
    CLASSES,
    EXAMPLES,
    PIXELS,
    SEED,
    check_against,
    make,
    split_mix,
    take,
)


def draw_box(numbers, size, area, ratio):
    """A rectangle by the published recipe, in a loop; None if none fits."""
    height, width = size
    for share, aspect in zip(numbers[:10], numbers[10:20], strict=True):
        pixels = (area[0] + (area[1] - area[0]) * share) * height * width
        low, high = math.log(ratio[0]), math.log(ratio[1])
        form = math.exp(low + (high - low) * aspect)
        wide, tall = round(math.sqrt(pixels * form)), round(math.sqrt(pixels / form))
        if 0 < wide <= width and 0 < tall <= height:
            top = int(numbers[20] * (height - tall + 1))
            left = int(numbers[21] * (width - wide + 1))
            return top, left, tall, wide
    return None


def resize(image, box, size):
    """By Pillow, which rounds between rows and columns as well."""
    top, left, tall, wide = box
    part = Image.fromarray(image[top : top + tall, left : left + wide])
    return np.asarray(part.resize((size, size), Image.Resampling.BILINEAR))


@pytest.mark.parametrize(
    ("area", "ratio", "size"),
    [((0.08, 1.0), (3 / 4, 4 / 3), 4), ((0.2, 0.6), (0.5, 2.0), 9), ((0.9, 1.0), (9.0, 10.0), 3)],
    ids=["smaller", "larger", "none-fits"],
)
def test_random_resized_crop(area, ratio, size):
    def crop(image, numbers):
        box = draw_box(numbers, (6, 5), area, ratio)
        if box is None:  # the middle, as wide as the ratio allows
            tall, wide = min(6, round(5 / ratio[0])), min(5, round(6 * ratio[1]))
            box = (6 - tall) // 2, (5 - wide) // 2, tall, wide
        return resize(image, box, size)

    check_against(t.RandomResizedCrop(size, area, ratio), crop, 22, atol=1)


def test_images_of_many_sizes_become_images_of_one():
    generator = np.random.default_rng(1)
    shapes = [(9, 7), (6, 12), (20, 20)]
    images = [generator.integers(0, 256, size=(*s, 3)).astype(np.uint8) for s in shapes]
    transform = t.RandomResizedCrop(5)
    draws = t.Draws(seed=SEED, epochs=np.zeros(3, int), examples=np.arange(3))
    found = transform.apply({"x": images}, draws.fold_in(0))["x"]
    for example, image in enumerate(images):
        numbers = split_mix(SEED, 0, example, 0, 22)
        box = draw_box(numbers, image.shape[:2], transform.area, transform.ratio)
        wanted = resize(image, box, 5).astype(int)
        assert np.abs(found[example].astype(int) - wanted).max() <= 1
    middle = transform.apply_once({"x": images})["x"]
    for image, one in zip(images, middle, strict=True):
        height, width = image.shape[:2]
        side = round(0.875 * min(height, width))
        box = ((height - side) // 2, (width - side) // 2, side, side)
        assert np.abs(one.astype(int) - resize(image, box, 5).astype(int)).max() <= 1


def test_random_erasing():
    def erase(image, numbers):
        box = draw_box(numbers[1:], (6, 5), (0.02, 1 / 3), (0.3, 3.3))
        erased = image.copy()
        if numbers[0] < 0.7 and box is not None:
            top, left, tall, wide = box
            erased[top : top + tall, left : left + wide] = 17
        return erased

    check_against(t.RandomErasing(0.7, value=17), erase, 23)


def mix(image, other, label, other_label, numbers, *, mixup, cutmix, switch):
    """One image and its label, as the papers say."""
    keep, kind, number, down, across = numbers
    cuts = kind < switch
    alpha = cutmix if cuts else mixup
    share = scipy.stats.beta(alpha, alpha).ppf(number) if keep < 0.9 else 1.0
    if not cuts:
        blended = np.rint(share * image.astype(float) + (1 - share) * other).astype(np.uint8)
        return blended, share * label + (1 - share) * other_label
    result = image.copy()
    half = [int(math.sqrt(1 - share) * length) // 2 for length in (6, 5)]
    centre = [int(down * 6), int(across * 5)]
    rows = slice(max(centre[0] - half[0], 0), centre[0] + half[0])
    columns = slice(max(centre[1] - half[1], 0), centre[1] + half[1])
    result[rows, columns] = other[rows, columns]
    inside = np.zeros((6, 5))
    inside[rows, columns] = 1
    share = 1 - inside.mean()
    return result, share * label + (1 - share) * other_label


@pytest.mark.parametrize(
    ("options", "switch"),
    [({}, 0.5), ({"cutmix": 0.0}, 0.0), ({"mixup": 0.0}, 1.0)],
    ids=["both", "mixup", "cutmix"],
)
def test_mixtures_of_neighbours(options, switch):
    transform = t.MixImages(4, probability=0.9, smoothing=0.1, **options)
    data = make(transform, batch=3)
    found = take(data, 8)
    soft = 0.9 * np.eye(4)[CLASSES] + 0.025
    for position in range(24):
        example, other = (int(found["number"][p]) for p in (position, position ^ 1))
        numbers = split_mix(SEED, position // EXAMPLES, example, 0, 5)
        image, label = mix(
            PIXELS[example], PIXELS[other], soft[example], soft[other], numbers,
            mixup=0.8, cutmix=1.0, switch=switch,
        )  # fmt: skip
        assert np.abs(found["x"][position].astype(int) - image.astype(int)).max() <= 1
        np.testing.assert_allclose(found["y"][position], label, rtol=1e-5, atol=1e-6)
    assert found["y"].dtype == np.float32
    # Three processes have a row each, one of each pair.
    parts = [take(data, 8, process=p, processes=3) for p in range(3)]
    for name, values in found.items():
        rows = np.stack([part[name] for part in parts], axis=1)
        np.testing.assert_array_equal(rows.reshape(values.shape), values)
    once = next(data.once(batch=4))
    np.testing.assert_array_equal(once["y"], CLASSES[:4])
    np.testing.assert_array_equal(once["x"], PIXELS[:4])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: t.RandomResizedCrop(0), "whole number of pixels"),
        (lambda: t.RandomResizedCrop(4, area=(0.5, 1.5)), "at most 1, got"),
        (lambda: t.RandomErasing(ratio=(2.0, 1.0)), "smallest and the largest"),
        (lambda: t.MixImages(1), "2 or more"),
        (lambda: t.MixImages(4, mixup=0, cutmix=0), "leave it out"),
        (lambda: t.MixImages(4, mixup=-1.0), "finite numbers, 0 or more"),
        (lambda: take(make(t.MixImages(3)), 3), "from 0 to 2"),
        (lambda: take(make(t.MixImages(4), t.MixImages(4)), 1), r"float32\[4, 4\]"),
    ],
    ids=range(8),
)
def test_mistakes_are_errors(build, message):
    with pytest.raises(cx.UserError, match=message):
        build()
