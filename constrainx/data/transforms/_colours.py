"""Changes of brightness, contrast, colour and sharpness, of bytes and by the batch.

Each takes images of unsigned bytes and one number for each image, and does what Pillow's
``ImageEnhance`` and ``ImageOps`` do to one image.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int, UInt8

from constrainx.data.transforms._resize import to_dtype

Images = UInt8[np.ndarray, "batch height width channels"]
Amount = Float[np.ndarray, " batch"]


def change_brightness(images: Images, amount: Amount) -> Images:
    """Multiplies by 1 + amount: −1 is black."""
    return _blend(np.zeros(1, np.float32), images, amount)


def change_contrast(images: Images, amount: Amount) -> Images:
    """Moves pixels away from the mean brightness of their image: −1 is that grey."""
    mean = np.floor(find_grey(images).mean(axis=(1, 2), keepdims=True) + 0.5)
    return _blend(mean[..., None].astype(np.float32), images, amount)


def change_saturation(images: Images, amount: Amount) -> Images:
    """Moves pixels away from their own grey: −1 is an image without colours."""
    return _blend(find_grey(images)[..., None].astype(np.float32), images, amount)


def change_sharpness(images: Images, amount: Amount) -> Images:
    """Moves pixels away from a smooth image: −1 is that image, whose edge stays as it was."""
    if min(images.shape[1:3]) < 3:
        return images
    windows = np.lib.stride_tricks.sliding_window_view(
        images.astype(np.float32), (3, 3), axis=(1, 2)
    )
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13
    smooth = images.astype(np.float32)
    smooth[:, 1:-1, 1:-1] = np.floor(np.einsum("bhwcij,ij->bhwc", windows, kernel) + 0.5)
    return _blend(smooth, images, amount)


def posterise(images: Images, bits: Int[np.ndarray, " batch"]) -> Images:
    """Keeps the leading bits of each byte."""
    kept = (0xFF << (8 - bits)) & 0xFF
    return images & kept.astype(np.uint8)[:, None, None, None]


def solarise(images: Images, threshold: Amount) -> Images:
    """Inverts pixels of at least the threshold."""
    return np.where(images >= threshold[:, None, None, None], 255 - images, images)


def stretch_contrast(images: Images) -> Images:
    """Stretches each channel to the whole range from 0 to 255."""
    low = images.min(axis=(1, 2), keepdims=True).astype(np.int64)
    high = images.max(axis=(1, 2), keepdims=True).astype(np.int64)
    scale = 255 / np.maximum(high - low, 1)
    stretched = np.clip((images * scale - low * scale).astype(np.int64), 0, 255)
    return np.where(high > low, stretched, images).astype(np.uint8)


def equalise(images: Images) -> Images:
    """Makes the brightness of each channel as evenly distributed as one table for it can."""
    count, height, width, channels = images.shape
    planes = np.moveaxis(images, -1, 1).reshape(count * channels, height * width)
    offsets = 256 * np.arange(count * channels)[:, None]
    counts = np.bincount((planes + offsets).ravel(), minlength=256 * count * channels)
    histogram = counts.reshape(-1, 256)
    brightest = 255 - np.argmax(histogram[:, ::-1] > 0, axis=1)
    rest = height * width - histogram[np.arange(len(histogram)), brightest]
    step = (rest // 255)[:, None]
    before = np.cumsum(histogram, axis=1) - histogram
    table = np.clip((step // 2 + before) // np.maximum(step, 1), 0, 255)
    table = np.where(step > 0, table, np.arange(256)).astype(np.uint8)
    found = np.take_along_axis(table, planes.astype(np.int64), axis=1)
    return np.moveaxis(found.reshape(count, channels, height, width), 1, -1)


def find_grey(images: Images) -> Int[np.ndarray, "batch height width"]:
    """The brightness of pixels by ITU-R 601-2, in whole numbers; else the mean of all channels."""
    if images.shape[-1] != 3:
        return images.mean(axis=-1).astype(np.int64)
    weights = np.array([19595, 38470, 7471])
    return (images.astype(np.int64) @ weights + 0x8000) >> 16


def _blend(start: Float[np.ndarray, ...], images: Images, amount: Amount) -> Images:
    factor = (1 + amount)[:, None, None, None].astype(np.float32)
    # Pillow cuts off what is behind the point.
    return to_dtype(np.floor(np.clip(start + factor * (images - start), 0, 255)), images.dtype)
