"""Random rectangles without content."""

from __future__ import annotations

import dataclasses

import numpy as np

from constrainx.data.transforms._boxes import NUMBERS, check_range, draw_boxes, find_inside
from constrainx.data.transforms._draws import Draws
from constrainx.data.transforms._transform import Batch, Transform, check_probability, find_images


@dataclasses.dataclass(frozen=True)
class RandomErasing(Transform):
    """Paints a random rectangle in some images (Zhong et al., arXiv:1708.04896).

    Attributes:
        probability: of each image.
        area: the smallest and the largest share of the image.
        ratio: the smallest and the largest ratio of width and height.
        value: of the pixels. After `Normalise`, zero is the mean of the data.
        images: the entry of the batch that has the images, (batch, height, width, channels).
    """

    probability: float = 0.25
    area: tuple[float, float] = (0.02, 1 / 3)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: float = 0.0
    images: str = "x"

    def __post_init__(self) -> None:
        check_probability(self.probability, argument="RandomErasing(probability=...)")
        check_range(self.area, argument="RandomErasing(area=...)", most=1)
        check_range(self.ratio, argument="RandomErasing(ratio=...)")

    def apply(self, batch: Batch, draws: Draws) -> Batch:
        """Leaves an image alone if none of ten rectangles fits."""
        images = find_images(batch, self.images)
        numbers, size = draws.uniform(NUMBERS + 1), (images.shape[1], images.shape[2])
        boxes = draw_boxes(numbers[:, 1:], size=size, area=self.area, ratio=self.ratio)
        chosen = (numbers[:, 0] < self.probability) & boxes.found
        erased = find_inside(boxes, size) & chosen[:, None, None]
        value = np.asarray(self.value, images.dtype)
        return {**batch, self.images: np.where(erased[..., None], value, images)}
