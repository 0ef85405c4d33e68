"""Windows of an image: cutting them, joining them, and which tokens in them are neighbours."""

from __future__ import annotations

import functools

import numpy as np
from jaxtyping import Array, Bool, Int, Shaped


def split_windows(
    x: Shaped[Array | np.ndarray, "batch h w c"], window: int
) -> Shaped[Array | np.ndarray, "batch windows tokens c"]:
    """Cuts images into windows, row by row."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // window, window, width // window, window, channels)
    return x.swapaxes(2, 3).reshape(batch, -1, window * window, channels)


def join_windows(
    x: Shaped[Array | np.ndarray, "batch windows tokens c"], height: int, width: int
) -> Shaped[Array | np.ndarray, "batch {height} {width} c"]:
    """Undoes `split_windows`."""
    batch, _, tokens, channels = x.shape
    window = round(tokens**0.5)
    x = x.reshape(batch, height // window, width // window, window, window, channels)
    return x.swapaxes(2, 3).reshape(batch, height, width, channels)


@functools.cache
def index_positions(window: int) -> Int[np.ndarray, "tokens tokens"]:
    """Numbers the offset between each two tokens of a window, from 0 to (2 window − 1)² − 1."""
    rows, columns = np.divmod(np.arange(window * window), window)
    down = rows[:, None] - rows[None] + window - 1
    right = columns[:, None] - columns[None] + window - 1
    return down * (2 * window - 1) + right


@functools.cache
def mask_neighbours(
    height: int, width: int, window: int, shift: int
) -> Bool[np.ndarray, "windows tokens tokens"]:
    """Which tokens of each shifted window were neighbours in the image.

    Rolling the image brings its far edges together in one window, where they must not see each
    other.
    """
    region = 3 * _number_bands(height, window, shift)[:, None] + _number_bands(width, window, shift)
    regions = np.asarray(split_windows(region[None, :, :, None], window))[0, :, :, 0]
    return regions[:, :, None] == regions[:, None, :]


def _number_bands(side: int, window: int, shift: int) -> Int[np.ndarray, " side"]:
    """0 for the windows that rolling left whole; 1 and 2 for the two parts of the last one."""
    position = np.arange(side)
    return (position >= side - window).astype(int) + (position >= side - shift)
