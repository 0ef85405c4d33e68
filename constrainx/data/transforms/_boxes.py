"""Random rectangles in images, by area and aspect ratio."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from constrainx.errors import ArgumentError

ATTEMPTS = 10
# How many random numbers a rectangle takes.
NUMBERS = 2 * ATTEMPTS + 2


class Boxes(NamedTuple):
    """One rectangle for each image, in pixels.

    Attributes:
        top: the first row.
        left: the first column.
        height: how many rows.
        width: how many columns.
        found: whether a rectangle that fits was found; if not, it is the whole image.
    """

    top: Int[np.ndarray, " batch"]
    left: Int[np.ndarray, " batch"]
    height: Int[np.ndarray, " batch"]
    width: Int[np.ndarray, " batch"]
    found: Bool[np.ndarray, " batch"]


def draw_boxes(
    numbers: Float[np.ndarray, "batch numbers"],
    *,
    size: tuple[int, int],
    area: tuple[float, float],
    ratio: tuple[float, float],
) -> Boxes:
    """The first of ten random rectangles that fits into the image, at a random place.

    Args:
        numbers: `NUMBERS` of them for each image, uniform in [0, 1).
        size: height and width of the images.
        area: the smallest and the largest share of the image; all between are equally likely.
        ratio: the smallest and the largest ratio of width and height; its logarithm is uniform.
    """
    height, width = size
    shares, ratios = numbers[:, :ATTEMPTS], numbers[:, ATTEMPTS : 2 * ATTEMPTS]
    pixels = (area[0] + (area[1] - area[0]) * shares) * height * width
    low, high = np.log(ratio)
    aspect = np.exp(low + (high - low) * ratios)
    widths = np.round(np.sqrt(pixels * aspect)).astype(np.int64)
    heights = np.round(np.sqrt(pixels / aspect)).astype(np.int64)
    fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
    first, found = np.argmax(fits, axis=1), np.any(fits, axis=1)
    rows = np.arange(len(numbers))
    box_height = np.where(found, heights[rows, first], height)
    box_width = np.where(found, widths[rows, first], width)
    top = (numbers[:, -2] * (height - box_height + 1)).astype(np.int64)
    left = (numbers[:, -1] * (width - box_width + 1)).astype(np.int64)
    return Boxes(top, left, box_height, box_width, found)


def find_inside(boxes: Boxes, size: tuple[int, int]) -> Bool[np.ndarray, "batch height width"]:
    """The pixels of each image that lie in its rectangle."""
    rows, columns = np.arange(size[0]), np.arange(size[1])
    in_rows = (rows >= boxes.top[:, None]) & (rows < (boxes.top + boxes.height)[:, None])
    in_columns = (columns >= boxes.left[:, None]) & (columns < (boxes.left + boxes.width)[:, None])
    return in_rows[:, :, None] & in_columns[:, None, :]


def check_range(value: Any, *, argument: str, most: float = np.inf) -> None:
    """Raises unless it is a pair of positive numbers in order."""
    try:
        low, high = (float(number) for number in value)
    except (TypeError, ValueError):
        low, high = np.nan, np.nan
    if not 0 < low <= high <= most:
        limit = "" if np.isinf(most) else f" of at most {most:g}"
        raise ArgumentError(
            f"`{argument}` must be the smallest and the largest of positive numbers{limit}, got "
            f"{value!r}."
        )
