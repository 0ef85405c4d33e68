"""Pixels in units of their spread over the data."""

from __future__ import annotations

import dataclasses

import numpy as np

from constrainx.data.transforms._draws import Draws
from constrainx.data.transforms._transform import Batch, Transform, find_images
from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Normalise(Transform):
    """Subtracts the mean of each channel, and divides by its standard deviation; in float32.

    Both are for pixels from 0 to 1: images of unsigned bytes are divided by 255 first. In training
    and evaluation alike.

    Attributes:
        mean: of each channel.
        deviation: the standard deviation of each channel.
        images: the entry of the batch that has the images, (batch, height, width, channels).
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    images: str = "x"

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.deviation) or not min(self.deviation, default=0) > 0:
            raise ArgumentError(
                "`Normalise` needs a mean and a positive standard deviation for each channel, got "
                f"{self.mean} and {self.deviation}."
            )

    def apply(self, batch: Batch, draws: Draws) -> Batch:
        """Not random."""
        del draws
        return self.apply_once(batch)

    def apply_once(self, batch: Batch) -> Batch:
        """One multiplication and one addition for each pixel."""
        images = find_images(batch, self.images)
        if images.shape[-1] != len(self.mean):
            raise ArgumentError(
                f"`Normalise` has the means of {len(self.mean)} channels, but the images "
                f"{self.images!r} have {images.shape[-1]}."
            )
        one = 255.0 if images.dtype == np.uint8 else 1.0
        scale = 1 / (one * np.asarray(self.deviation))
        shift = -np.asarray(self.mean) / np.asarray(self.deviation)
        normal = np.multiply(images, scale.astype(np.float32), dtype=np.float32)
        normal += shift.astype(np.float32)
        return {**batch, self.images: normal}
