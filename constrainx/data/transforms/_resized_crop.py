"""Random parts of images, brought to one size."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from constrainx.data.transforms._boxes import NUMBERS, check_range, draw_boxes
from constrainx.data.transforms._draws import Draws
from constrainx.data.transforms._resize import resize_parts
from constrainx.data.transforms._transform import Batch, Transform, check_probability, find_entry
from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class RandomResizedCrop(Transform):
    """Cuts out a random part of each image, and brings it to one size.

    Takes images of one size or of many, which it is the first to bring to one. Where none of ten
    random rectangles fits, the part is the largest in the middle whose ratio is allowed. In
    `Batches.once` it is a square in the middle.

    Attributes:
        size: height and width of the result, in pixels.
        area: the smallest and the largest share of the image.
        ratio: the smallest and the largest ratio of width and height.
        centre: the side of the square of `Batches.once`, as a share of the shorter side.
        images: the entry of the batch that has the images, (batch, height, width, channels).
    """

    size: int
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    centre: float = 0.875
    images: str = "x"

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ArgumentError(
                f"`RandomResizedCrop(size={self.size!r})` must be a whole number of pixels."
            )
        check_range(self.area, argument="RandomResizedCrop(area=...)", most=1)
        check_range(self.ratio, argument="RandomResizedCrop(ratio=...)")
        check_probability(self.centre, argument="RandomResizedCrop(centre=...)")

    def apply(self, batch: Batch, draws: Draws) -> Batch:
        """Cuts each image by numbers of its own."""
        images = find_entry(batch, self.images, argument="images")
        numbers = draws.uniform(NUMBERS)
        if isinstance(images, np.ndarray):
            return {**batch, self.images: self._cut(images, numbers)}
        parts = [self._cut(one[None], numbers[i : i + 1]) for i, one in enumerate(images)]
        return {**batch, self.images: np.concatenate(parts)}

    def apply_once(self, batch: Batch) -> Batch:
        """Cuts out the middle."""
        images = find_entry(batch, self.images, argument="images")
        if isinstance(images, np.ndarray):
            return {**batch, self.images: self._cut_middle(images)}
        return {
            **batch,
            self.images: np.concatenate([self._cut_middle(one[None]) for one in images]),
        }

    def _cut(
        self, images: Any, numbers: Float[np.ndarray, "batch numbers"]
    ) -> Shaped[np.ndarray, "batch size size channels"]:
        height, width = self._measure(images)
        boxes = draw_boxes(numbers, size=(height, width), area=self.area, ratio=self.ratio)
        # Without a rectangle that fits: as much of the middle as the ratio allows.
        tall = min(height, round(width / self.ratio[0]))
        wide = min(width, round(height * self.ratio[1]))

        def choose(found: np.ndarray, otherwise: int) -> np.ndarray:
            return np.where(boxes.found, found, otherwise)

        return resize_parts(
            images,
            top=choose(boxes.top, (height - tall) // 2),
            left=choose(boxes.left, (width - wide) // 2),
            height=choose(boxes.height, tall),
            width=choose(boxes.width, wide),
            size=(self.size, self.size),
        )

    def _cut_middle(self, images: Any) -> Shaped[np.ndarray, "batch size size channels"]:
        height, width = self._measure(images)
        side = max(round(self.centre * min(height, width)), 1)

        def fill(value: int) -> np.ndarray:
            return np.full(len(images), value)

        return resize_parts(
            images,
            top=fill((height - side) // 2),
            left=fill((width - side) // 2),
            height=fill(side),
            width=fill(side),
            size=(self.size, self.size),
        )

    def _measure(self, images: Any) -> tuple[int, int]:
        if images.ndim != 4:
            raise ArgumentError(
                f"the images {self.images!r} must have the axes (height, width, channels), got "
                f"shape {images.shape[1:]}."
            )
        return images.shape[1:3]
