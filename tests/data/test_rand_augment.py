"""RandAugment against Pillow, one image and one change at a time."""

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

import constrainx as cx
from constrainx.data import transforms as t
from constrainx.data.transforms._affine import move_pixels, rotate
from tests.data.test_transforms import PIXELS, check_against, make, take

SHAPE = (40, 33)
# Smooth and with few values in some channels, so that histograms are uneven.
GENERATOR = np.random.default_rng(2)
IMAGES = np.cumsum(GENERATOR.integers(0, 9, size=(11, *SHAPE, 3)), axis=1).astype(np.uint8)
IMAGES[0] = 40  # of one colour


def enhance(kind):
    return lambda image, strength: kind(image).enhance(1 + 0.9 * strength)


def move(make_matrix):
    def change(image, strength):
        matrix = make_matrix(strength, image.size)
        return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)

    return change


# The changes in their order; the published strengths.
BY_PILLOW = [
    lambda image, s: image,
    move(lambda s, size: (1, 0.3 * s, 0, 0, 1, 0)),
    move(lambda s, size: (1, 0, 0, 0.3 * s, 1, 0)),
    move(lambda s, size: (1, 0, int(150 / 331 * size[0] * s), 0, 1, 0)),
    move(lambda s, size: (1, 0, 0, 0, 1, int(150 / 331 * size[1] * s))),
    lambda image, s: image.rotate(30 * s),
    enhance(ImageEnhance.Brightness),
    enhance(ImageEnhance.Color),
    enhance(ImageEnhance.Contrast),
    enhance(ImageEnhance.Sharpness),
    lambda image, s: ImageOps.posterize(image, 8 - round(4 * abs(s))),
    lambda image, s: ImageOps.solarize(image, 255 * (1 - abs(s))),
    lambda image, s: ImageOps.autocontrast(image),
    lambda image, s: ImageOps.equalize(image),
]


@pytest.mark.parametrize("magnitude", [0.0, 9.0, 30.0])
def test_each_change_is_that_of_pillow(magnitude):
    seen = set()

    def change(image, numbers):
        strength = magnitude / 30 * (-1 if numbers[1] < 0.5 else 1)
        index = int(numbers[0] * len(BY_PILLOW))
        seen.add(index)
        return np.asarray(BY_PILLOW[index](Image.fromarray(image), strength))

    # Blending rounds down, and may be one off where float32 and Pillow differ in the last digit.
    check_against(t.RandAugment(1, magnitude), change, 2, pixels=IMAGES, steps=30, atol=1)
    assert seen == set(range(len(BY_PILLOW)))


def test_turns_go_with_rot90():
    square = GENERATOR.integers(0, 256, size=(1, 6, 6, 3)).astype(np.uint8)
    turned = move_pixels(square, rotate(np.array([np.pi / 2]), size=(6, 6)))
    np.testing.assert_array_equal(turned[0], np.rot90(square[0]))


def test_several_changes_are_applied_in_turn():
    """Two changes are one of two after another, with numbers of their own."""
    twice = take(make(t.RandAugment(2), pixels=IMAGES, shuffle=False, batch=11), 1)["x"]
    draws = t.Draws(seed=3, epochs=np.zeros(11, int), examples=np.arange(11)).fold_in(0)
    numbers = draws.uniform(4)

    class Fixed:
        def __init__(self, values):
            self.values = values

        def uniform(self, count):
            return self.values

    batch = {"x": IMAGES}
    for turn in (numbers[:, :2], numbers[:, 2:]):
        batch = t.RandAugment(1).apply(batch, Fixed(turn))
    np.testing.assert_array_equal(twice, batch["x"])


def test_numbers_from_0_to_1_are_changed_like_bytes():
    bytes_ = take(make(t.RandAugment()), 3)["x"]
    unit = take(make(t.RandAugment(), pixels=(PIXELS / 255).astype(np.float32)), 3)["x"]
    assert unit.dtype == np.float32
    np.testing.assert_allclose(unit, bytes_ / 255, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: t.RandAugment(0), "1 or more"),
        (lambda: t.RandAugment(magnitude=31), "between 0 and 30"),
        (lambda: take(make(t.RandAugment(), pixels=PIXELS - 0.5), 1), "in front of `Normalise`"),
        (lambda: take(make(t.RandAugment(), pixels=PIXELS.astype(int)), 1), "got int64"),
    ],
    ids=range(4),
)
def test_mistakes_are_errors(build, message):
    with pytest.raises(cx.UserError, match=message):
        build()
