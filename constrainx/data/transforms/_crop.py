"""Random shifts, by padding and cropping."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from constrainx.data.transforms._draws import Draws
from constrainx.data.transforms._transform import Batch, Transform, find_images
from constrainx.errors import ArgumentError, check_choice


@dataclasses.dataclass(frozen=True)
class RandomCrop(Transform):
    """Pads images, and cuts out a part of the old size at a random place.

    With p pixels of padding all (2 p + 1)² shifts are equally likely.

    Attributes:
        padding: pixels on each side.
        mode: what they are: "constant" for zeros, "reflect" for a mirror image without its edge.
        images: the entry of the batch that has the images, (batch, height, width, channels).
    """

    padding: int = 4
    mode: Literal["constant", "reflect"] = "constant"
    images: str = "x"

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("constant", "reflect"), owner="RandomCrop")
        if isinstance(self.padding, bool) or not isinstance(self.padding, int) or self.padding < 0:
            raise ArgumentError(
                f"`RandomCrop(padding={self.padding!r})` must be a whole number of pixels, 0 or "
                "more."
            )

    def apply(self, batch: Batch, draws: Draws) -> Batch:
        """Shifts each image by numbers of its own."""
        images, pad = find_images(batch, self.images), self.padding
        _, height, width, _ = images.shape
        if self.mode == "reflect" and pad >= min(height, width):
            raise ArgumentError(
                f"`RandomCrop(padding={pad}, mode='reflect')` needs images of more than {pad} "
                f"pixels on each side, got {height} × {width}."
            )
        wide = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)), self.mode)
        top, left = (draws.uniform(2) * (2 * pad + 1)).astype(np.intp).T
        # Every window of each image, without a copy: (batch, top, left, channels, rows, columns).
        windows = np.lib.stride_tricks.sliding_window_view(wide, (height, width), axis=(1, 2))
        cut = windows[np.arange(len(images)), top, left]
        return {**batch, self.images: np.ascontiguousarray(np.moveaxis(cut, 1, -1))}
