"""Photographs of any size become squares of one size, by themselves and through TFDS."""

import contextlib
import itertools

import numpy as np
import pytest
from PIL import Image

from constrainx import data
from constrainx.errors import ArgumentError

from .photographs import EXAMPLES, make_image, make_photograph

SIZE = 8
SHAPES = {
    "tall": (40, 12, 3),
    "wide": (10, 33, 3),
    "square": (20, 20, 3),
    "grey": (24, 17, 1),
    "small": (3, 5, 3),
    "one row": (1, 30, 3),
}


def make_gradient(height, width):
    """Red is the row and green the column, so that a crop tells where it was."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows, columns, 0 * rows], axis=-1).astype(np.uint8)


def random_crop(image, seed=0, size=SIZE, **options):
    crop = data.RandomPhotographCrop(size, **options)
    rng = np.random.default_rng(seed)
    return crop.random_map({"image": image, "label": np.int64(7)}, rng)


def centre_crop(image, size=SIZE, **options):
    return data.CentrePhotographCrop(size, **options).map({"image": image, "label": np.int64(7)})


@pytest.mark.parametrize("crop", [random_crop, centre_crop])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_photograph_becomes_a_square_in_colour(shape, crop):
    found = crop(make_image(shape))
    assert sorted(found) == ["x", "y"]
    assert (found["x"].shape, found["x"].dtype) == ((SIZE, SIZE, 3), np.uint8)
    assert (found["y"].shape, found["y"].dtype, found["y"]) == ((), np.int32, 7)
    if shape[-1] == 1:
        assert (found["x"] == found["x"][..., :1]).all()


def test_a_crop_is_a_function_of_its_generator():
    image = make_image((50, 40, 3))
    first, again = random_crop(image, seed=3), random_crop(image, seed=3)
    np.testing.assert_array_equal(first["x"], again["x"])
    others = [random_crop(image, seed=seed)["x"] for seed in range(20)]
    assert len({other.tobytes() for other in others}) == 20


@pytest.mark.parametrize("area", [(0.08, 1.0), (0.3, 0.4)])
@pytest.mark.parametrize("shape", [(120, 160), (160, 120), (200, 200)])
def test_the_share_and_the_shape_of_the_part_keep_their_bounds(shape, area):
    """Measured from the pixels: in a gradient, a step of the result is the size of the part."""
    height, width = shape
    image = make_gradient(height, width)
    shares, ratios = [], []
    for seed in range(60):
        found = random_crop(image, seed, size=16, area=area)["x"].astype(float)
        # Between the second and the last but one, whose windows lie within the part.
        down = 16 * (found[-2, 8, 0] - found[1, 8, 0]) / 13
        across = 16 * (found[8, -2, 1] - found[8, 1, 1]) / 13
        shares.append(down * across / (height * width))
        ratios.append(across / down)
    # Pixels are whole numbers: a side is known to 16 / 13 of a level, and rounded to a pixel.
    slack = 2.3 / np.sqrt(np.min(shares) * height * width)
    assert area[0] * (1 - 2 * slack) <= min(shares)
    assert max(shares) <= min(area[1] * (1 + 2 * slack), 1.03)
    assert 3 / 4 * (1 - 2 * slack) <= min(ratios)
    assert max(ratios) <= 4 / 3 * (1 + 2 * slack)
    assert max(shares) - min(shares) > (area[1] - area[0]) / 2


def test_parts_lie_everywhere_in_the_photograph():
    image = make_gradient(100, 200)
    found = [random_crop(image, seed, area=(0.1, 0.1))["x"].astype(float) for seed in range(80)]
    rows, columns = np.array([one.mean(axis=(0, 1))[:2] for one in found]).T
    assert rows.min() < 30
    assert rows.max() > 70
    assert columns.min() < 40
    assert columns.max() > 160


def test_a_part_that_never_fits_is_the_largest_square_in_the_middle():
    image = make_image((10, 200, 3))
    found = random_crop(image, area=(1.0, 1.0))["x"]
    square = Image.fromarray(image[:, 95:105])
    wanted = np.asarray(square.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("crop", ["random", "centre"])
@pytest.mark.parametrize("size", [5, 20, 31])
def test_a_crop_of_all_is_a_plain_resize(crop, size):
    image = make_image((20, 20, 3))
    if crop == "random":
        found = random_crop(image, size=size, area=(1.0, 1.0), ratio=(1.0, 1.0))["x"]
    else:
        found = centre_crop(image, size=size, share=1.0)["x"]
    wanted = np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(found, wanted)
    if size == 20:
        np.testing.assert_array_equal(found, image)


@pytest.mark.parametrize("shape", [(40, 16, 3), (16, 40, 3)])
def test_the_middle_is_that_of_the_longer_side(shape):
    image = make_image(shape)
    found = centre_crop(image, size=16, share=1.0)["x"]
    middle = image[12:28] if shape[0] == 40 else image[:, 12:28]
    np.testing.assert_array_equal(found, middle)
    # Seven eighths of 16 pixels are 14, from the second to the last but one.
    inner = centre_crop(image, size=14)["x"]
    np.testing.assert_array_equal(inner, middle[1:15, 1:15])


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "8"])
def test_a_wrong_size_is_named(size):
    with pytest.raises(ArgumentError, match=r"RandomPhotographCrop\(size=.*whole number of pixels"):
        data.RandomPhotographCrop(size)
    with pytest.raises(ArgumentError, match=r"CentrePhotographCrop\(size=.*whole number of pixels"):
        data.CentrePhotographCrop(size)


def take(batches, count, **options):
    with contextlib.closing(batches.from_step(1, **options)) as iterator:
        return list(itertools.islice(iterator, count))


def test_photographs_of_many_sizes_train_through_tfds(photographs):
    transforms = (
        data.RandomPhotographCrop(SIZE),
        data.transforms.RandomFlip(),
        data.transforms.Normalise((0.5,) * 3, (0.25,) * 3),
        data.transforms.MixImages(EXAMPLES),
    )
    batches = data.tfds(
        "photographs", "train", batch=6, data_dir=photographs, transforms=transforms
    )
    whole = take(batches, 4)
    assert whole[0]["x"].shape == (6, SIZE, SIZE, 3)
    assert whole[0]["x"].dtype == whole[0]["y"].dtype == np.float32
    parts = [take(batches, 4, process=process, processes=2) for process in range(2)]
    for wanted, first, second in zip(whole, *parts, strict=True):
        for entry in ("x", "y"):
            joined = np.concatenate([first[entry], second[entry]])
            np.testing.assert_array_equal(joined, wanted[entry])


def test_each_epoch_cuts_other_parts(photographs):
    crop = data.RandomPhotographCrop(SIZE)
    options = {"batch": EXAMPLES, "data_dir": photographs, "shuffle": False, "transforms": (crop,)}
    first, second = take(data.tfds("photographs", "train", **options), 2)
    np.testing.assert_array_equal(first["y"], np.arange(EXAMPLES))
    assert (first["x"] != second["x"]).any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("processes", [1, 2])
def test_evaluation_sees_the_middle_of_each_photograph(photographs, processes):
    options = {"batch": 6, "data_dir": photographs, "shuffle": False}
    crop = data.CentrePhotographCrop(SIZE)
    batches = data.tfds("photographs", "train", transforms=(crop,), **options)
    parts = [list(batches.once(batch=6, process=p, processes=processes)) for p in range(processes)]
    found = [one for step in zip(*parts, strict=True) for one in step]
    x, mask = (np.concatenate([one[entry] for one in found]) for entry in ("x", "mask"))
    assert (len(x), mask.sum()) == (18, EXAMPLES)
    for number in range(EXAMPLES):
        np.testing.assert_array_equal(x[number], centre_crop(make_photograph(number))["x"])
