"""Images turned by one angle, ahead of training."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float


def turn_images(
    images: Float[np.ndarray, "batch height width channels"], degrees: float
) -> Float[np.ndarray, "batch height width channels"]:
    """Images turned about their centre, by bilinear interpolation; pixels from outside are zero.

    The weights of the four neighbours are the same for all images, so this takes four lookups.

    >>> import numpy as np
    >>> print(turn_images(np.eye(2)[None, :, :, None], 90.0)[0, :, :, 0].round(6) + 0.0)
    [[0. 1.]
     [1. 0.]]

    Args:
        images: to turn.
        degrees: in the direction of `numpy.rot90`.
    """
    height, width = images.shape[1:3]
    angle = np.deg2rad(degrees)
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    y, x = rows - (height - 1) / 2, columns - (width - 1) / 2
    back_y = np.cos(angle) * y + np.sin(angle) * x + (height - 1) / 2
    back_x = -np.sin(angle) * y + np.cos(angle) * x + (width - 1) / 2
    turned = np.zeros_like(images)
    for corner_y, corner_x in ((0, 0), (0, 1), (1, 0), (1, 1)):
        at_y, at_x = np.floor(back_y) + corner_y, np.floor(back_x) + corner_x
        weight = (1 - np.abs(back_y - at_y)) * (1 - np.abs(back_x - at_x))
        inside = (at_y >= 0) & (at_y < height) & (at_x >= 0) & (at_x < width)
        found = images[
            :,
            np.clip(at_y, 0, height - 1).astype(int),
            np.clip(at_x, 0, width - 1).astype(int),
        ]
        turned += (weight * inside).astype(images.dtype)[..., None] * found
    return turned
