"""Random reflections."""

from __future__ import annotations

import dataclasses

from constrainx.data.transforms._draws import Draws
from constrainx.data.transforms._transform import Batch, Transform, check_probability, find_images


@dataclasses.dataclass(frozen=True)
class RandomFlip(Transform):
    """Exchanges left and right of some images.

    Attributes:
        probability: of each image.
        images: the entry of the batch that has the images, (batch, height, width, channels).
    """

    probability: float = 0.5
    images: str = "x"

    def __post_init__(self) -> None:
        check_probability(self.probability, argument="RandomFlip(probability=...)")

    def apply(self, batch: Batch, draws: Draws) -> Batch:
        """Flips those whose number is below the probability."""
        images = find_images(batch, self.images)
        chosen = draws.uniform(1)[:, 0] < self.probability
        flipped = images.copy()
        flipped[chosen] = images[chosen, :, ::-1]
        return {**batch, self.images: flipped}
