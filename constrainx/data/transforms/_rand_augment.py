"""Random sequences of changes of images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from constrainx.data.transforms import _affine, _colours
from constrainx.data.transforms._colours import Images
from constrainx.data.transforms._draws import Draws
from constrainx.data.transforms._resize import to_dtype
from constrainx.data.transforms._transform import Batch, Transform, find_images
from constrainx.errors import ArgumentError

# Images and a signed strength in [−1, 1] for each ↦ images.
Change: TypeAlias = Callable[[Images, Float[np.ndarray, " batch"]], Images]

STRONGEST = 30


def _moving(matrices: Callable[[np.ndarray], np.ndarray], scale: float) -> Change:
    return lambda images, strength: _affine.move_pixels(images, matrices(scale * strength))


def _shift(matrices: Callable[[np.ndarray], np.ndarray], axis: int) -> Change:
    def change(images: Images, strength: Float[np.ndarray, " batch"]) -> Images:
        return _affine.move_pixels(images, matrices(150 / 331 * images.shape[axis] * strength))

    return change


def _turn(images: Images, strength: Float[np.ndarray, " batch"]) -> Images:
    matrices = _affine.rotate(np.radians(30) * strength, size=images.shape[1:3])
    return _affine.move_pixels(images, matrices)


def _posterise(images: Images, strength: Float[np.ndarray, " batch"]) -> Images:
    return _colours.posterise(images, 8 - np.rint(4 * np.abs(strength)).astype(np.int64))


# In the order of torchvision, with its ranges.
CHANGES: dict[str, Change] = {
    "identity": lambda images, _: images,
    "shear across": _moving(_affine.shear_across, 0.3),
    "shear down": _moving(_affine.shear_down, 0.3),
    "shift across": _shift(_affine.shift_across, 2),
    "shift down": _shift(_affine.shift_down, 1),
    "rotate": _turn,
    "brightness": lambda images, s: _colours.change_brightness(images, 0.9 * s),
    "saturation": lambda images, s: _colours.change_saturation(images, 0.9 * s),
    "contrast": lambda images, s: _colours.change_contrast(images, 0.9 * s),
    "sharpness": lambda images, s: _colours.change_sharpness(images, 0.9 * s),
    "posterise": _posterise,
    "solarise": lambda images, s: _colours.solarise(images, 255 * (1 - np.abs(s))),
    "stretch contrast": lambda images, _: _colours.stretch_contrast(images),
    "equalise": lambda images, _: _colours.equalise(images),
}


@dataclasses.dataclass(frozen=True)
class RandAugment(Transform):
    """A few random changes one after another, all of the same strength (arXiv:1909.13719).

    The changes are those of the paper: shears, shifts, rotations, brightness, saturation, contrast,
    sharpness, posterising, solarising, stretched contrast, equalised histograms, and none at all.
    All images that draw the same one are changed together.

    Images are unsigned bytes, or numbers from 0 to 1 that are rounded to 1/255: put it in front of
    `Normalise`.

    Attributes:
        number: of changes for each image.
        magnitude: their strength, from 0 to 30.
        images: the entry of the batch that has the images, (batch, height, width, channels).
    """

    number: int = 2
    magnitude: float = 9.0
    images: str = "x"

    def __post_init__(self) -> None:
        if isinstance(self.number, bool) or not isinstance(self.number, int) or self.number < 1:
            raise ArgumentError(f"`RandAugment(number={self.number!r})` must be 1 or more.")
        if not 0 <= self.magnitude <= STRONGEST:
            raise ArgumentError(
                f"`RandAugment(magnitude={self.magnitude!r})` must lie between 0 and {STRONGEST}."
            )

    def apply(self, batch: Batch, draws: Draws) -> Batch:
        """Changes each image by those that it has drawn, in turn."""
        images = find_images(batch, self.images)
        changed = self._to_bytes(images)
        numbers = draws.uniform(2 * self.number).reshape(len(images), self.number, 2)
        for turn in range(self.number):
            changed = self._change(changed, numbers[:, turn])
        if images.dtype != np.uint8:
            changed = changed.astype(images.dtype) / images.dtype.type(255)
        return {**batch, self.images: changed}

    def _change(self, images: Images, numbers: Float[np.ndarray, "batch 2"]) -> Images:
        chosen = (numbers[:, 0] * len(CHANGES)).astype(np.int64)
        strength = np.where(numbers[:, 1] < 0.5, -1, 1) * (self.magnitude / STRONGEST)
        result = images.copy()
        for index, change in enumerate(CHANGES.values()):
            rows = np.flatnonzero(chosen == index)
            if rows.size:
                result[rows] = change(images[rows], strength[rows])
        return result

    def _to_bytes(self, images: np.ndarray) -> Images:
        if images.dtype == np.uint8:
            return images
        if not np.issubdtype(images.dtype, np.floating):
            raise ArgumentError(
                f"`RandAugment` needs images of unsigned bytes, or numbers from 0 to 1, got "
                f"{images.dtype}."
            )
        if images.size and not (images.min() >= 0 and images.max() <= 1):
            raise ArgumentError(
                "`RandAugment` needs images with pixels from 0 to 1, got "
                f"{images.min():.3g} to {images.max():.3g}: put it in front of `Normalise`."
            )
        return to_dtype(255 * images, np.dtype(np.uint8))
