"""Parts of images at another size, by linear interpolation that does not alias."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int, Shaped


def resize_parts(
    images: Shaped[np.ndarray, "batch height width channels"],
    *,
    top: Int[np.ndarray, " batch"],
    left: Int[np.ndarray, " batch"],
    height: Int[np.ndarray, " batch"],
    width: Int[np.ndarray, " batch"],
    size: tuple[int, int],
) -> Shaped[np.ndarray, "batch rows columns channels"]:
    """One rectangle of each image, at the given size and in the dtype of the images.

    Enlarging interpolates between the nearest pixels. Reducing takes the mean with a triangle as
    wide as the distance of the new pixels, as Pillow does.
    """
    count, full_height, full_width, channels = images.shape
    down = _find_weights(top, height, size[0], full_height)
    across = _find_weights(left, width, size[1], full_width)
    flat = images.astype(np.float32).reshape(count, full_height, full_width * channels)
    rows = np.matmul(down, flat).reshape(count, size[0], full_width, channels)
    resized = np.matmul(across[:, None], rows)
    return to_dtype(resized, images.dtype)


def to_dtype(values: Float[np.ndarray, "*shape"], dtype: np.dtype) -> Shaped[np.ndarray, "*shape"]:
    """Real pixels in the dtype that images have: bytes are rounded and cut off at their ends."""
    if dtype == np.uint8:
        return np.clip(np.rint(values), 0, 255).astype(np.uint8)
    return values.astype(dtype)


def _find_weights(
    first: Int[np.ndarray, " batch"], length: Int[np.ndarray, " batch"], size: int, total: int
) -> Float[np.ndarray, "batch {size} {total}"]:
    """How much of each old pixel is in each new one."""
    scale = (length / size)[:, None, None]
    centres = first[:, None, None] + (np.arange(size)[:, None] + 0.5) * scale
    pixels = np.arange(total)
    distance = np.abs(pixels + 0.5 - centres) / np.maximum(scale, 1)
    inside = (pixels >= first[:, None]) & (pixels < (first + length)[:, None])
    weights = np.maximum(1 - distance, 0) * inside[:, None]
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)
