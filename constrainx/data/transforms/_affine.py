"""Shears, shifts and rotations of images, by the batch."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Shaped


def move_pixels(
    images: Shaped[np.ndarray, "batch height width channels"],
    matrices: Float[np.ndarray, "batch 2 3"],
) -> Shaped[np.ndarray, "batch height width channels"]:
    """Moves pixels by affine maps about the upper left corner; from outside comes zero.

    A pixel of the result at the centre (x, y) is the pixel of the image in which M (x, y, 1) lies.
    """
    count, height, width, _ = images.shape
    columns, rows = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    centres = np.stack([columns, rows, np.ones_like(rows)]).reshape(3, -1)
    sources = np.floor(matrices @ centres).astype(np.int64)
    x, y = sources[:, 0], sources[:, 1]
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    flat = images.reshape(count, height * width, -1)
    position = np.where(inside, y * width + x, 0)
    moved = np.take_along_axis(flat, position[:, :, None], axis=1)
    return np.where(inside[:, :, None], moved, 0).astype(images.dtype).reshape(images.shape)


def shear_across(amount: Float[np.ndarray, " batch"]) -> Float[np.ndarray, "batch 2 3"]:
    """Moves rows sideways, in proportion to their distance from the first."""
    return _fill(amount, {(0, 1): amount})


def shear_down(amount: Float[np.ndarray, " batch"]) -> Float[np.ndarray, "batch 2 3"]:
    """Moves columns down, in proportion to their distance from the first."""
    return _fill(amount, {(1, 0): amount})


def shift_across(amount: Float[np.ndarray, " batch"]) -> Float[np.ndarray, "batch 2 3"]:
    """Moves everything to the left, by whole pixels."""
    return _fill(amount, {(0, 2): np.trunc(amount)})


def shift_down(amount: Float[np.ndarray, " batch"]) -> Float[np.ndarray, "batch 2 3"]:
    """Moves everything up, by whole pixels."""
    return _fill(amount, {(1, 2): np.trunc(amount)})


def rotate(
    angle: Float[np.ndarray, " batch"], *, size: tuple[int, int]
) -> Float[np.ndarray, "batch 2 3"]:
    """Turns images about their centre, in radians, in the direction of `np.rot90`."""
    cos, sin = np.cos(angle), np.sin(angle)
    y, x = size[0] / 2, size[1] / 2
    return _fill(
        angle,
        {
            (0, 0): cos,
            (0, 1): -sin,
            (0, 2): x - cos * x + sin * y,
            (1, 0): sin,
            (1, 1): cos,
            (1, 2): y - sin * x - cos * y,
        },
    )


def _fill(
    amount: Float[np.ndarray, " batch"], entries: dict[tuple[int, int], np.ndarray]
) -> Float[np.ndarray, "batch 2 3"]:
    """The identity, but for these entries."""
    matrices = np.zeros((len(amount), 2, 3))
    matrices[:, [0, 1], [0, 1]] = 1
    for (row, column), values in entries.items():
        matrices[:, row, column] = values
    return matrices
