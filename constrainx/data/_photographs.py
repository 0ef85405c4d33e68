"""Photographs of any size, cut to one size example by example, so that they fit into a batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import grain
import numpy as np
from jaxtyping import UInt8

from constrainx.errors import ArgumentError, MissingPackageError


@dataclasses.dataclass(frozen=True)
class RandomPhotographCrop(grain.transforms.RandomMap):
    """A random part of a photograph, resized to a square: for training.

    The part has a random share of the area and a random shape; if none of ten fits into the
    photograph, it is the largest square in the middle. For `constrainx.data.tfds`, whose examples
    have an "image" and a "label", which become "x", as bytes, and "y".

    Attributes:
        size: height and width of the result.
        area: the smallest and largest share.
        ratio: the smallest and largest width, in heights.
    """

    size: int
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        _check_size(self.size, type(self).__name__)

    def random_map(self, element: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """The example with a part of its image."""
        image = element["image"]
        height, width = image.shape[:2]
        box = _centre(height, width, min(height, width))
        for _ in range(10):
            share = rng.uniform(*self.area) * height * width
            narrow, wide = self.ratio
            shape = math.exp(rng.uniform(math.log(narrow), math.log(wide)))
            across, down = round(math.sqrt(share * shape)), round(math.sqrt(share / shape))
            if 0 < across <= width and 0 < down <= height:
                left, top = rng.integers(width - across + 1), rng.integers(height - down + 1)
                box = (int(left), int(top), int(left) + across, int(top) + down)
                break
        return _as_example(_resize(image, box, self.size), element["label"])


@dataclasses.dataclass(frozen=True)
class CentrePhotographCrop(grain.transforms.Map):
    """The middle of a photograph, resized to a square: for evaluation.

    Attributes:
        size: height and width of the result.
        share: of the shorter side that is kept.
    """

    size: int
    share: float = 0.875

    def __post_init__(self) -> None:
        _check_size(self.size, type(self).__name__)

    def map(self, element: dict[str, Any]) -> dict[str, Any]:
        """The example with the middle of its image."""
        height, width = element["image"].shape[:2]
        side = max(1, round(self.share * min(height, width)))
        box = _centre(height, width, side)
        return _as_example(_resize(element["image"], box, self.size), element["label"])


def _centre(height: int, width: int, side: int) -> tuple[int, int, int, int]:
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def _resize(
    image: UInt8[np.ndarray, "h w c"], box: tuple[int, int, int, int], size: int
) -> UInt8[np.ndarray, "size size 3"]:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingPackageError(
            "photographs are resized by Pillow: pip install 'constrainx[data]'."
        ) from error

    # Cut first: Pillow's `resize(box=...)` also looks at pixels outside of the box.
    left, top, right, bottom = box
    part = image[top:bottom, left:right]
    picture = Image.fromarray(part.squeeze(-1) if part.shape[-1] == 1 else part).convert("RGB")
    return np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR))


def _as_example(image: np.ndarray, label: Any) -> dict[str, Any]:
    return {"x": image, "y": np.asarray(label, np.int32)}


def _check_size(size: Any, owner: str) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ArgumentError(f"`{owner}(size={size!r})` must be a whole number of pixels.")
