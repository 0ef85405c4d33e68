"""Random rotations, zooms and shifts of images, for augmentation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float


def move_image(
    image: Float[Array, "height width channels"],
    *,
    angle: Float[ArrayLike, ""],
    zoom: Float[ArrayLike, ""],
    shift: Float[Array, 2],
) -> Float[Array, "height width channels"]:
    """Rotates an image about its centre, zooms and shifts it; pixels from outside are zero.

    >>> import jax.numpy as jnp
    >>> image = jnp.eye(3)[:, :, None]
    >>> print(move_image(image, angle=0.0, zoom=1.0, shift=jnp.array([1.0, 0.0]))[:, :, 0])
    [[0. 0. 0.]
     [1. 0. 0.]
     [0. 1. 0.]]

    Args:
        image: pixels.
        angle: in radians, in the direction of `jnp.rot90`.
        zoom: above one to enlarge.
        shift: down and to the right, in pixels, after rotation and zoom.
    """
    height, width = image.shape[:2]
    centre = jnp.array([height - 1, width - 1]) / 2
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    # Maps a pixel of the result to where its value comes from.
    back = jnp.array([[cos, sin], [-sin, cos]]) / zoom
    pixels = jnp.stack(jnp.meshgrid(jnp.arange(height), jnp.arange(width), indexing="ij"), axis=-1)
    rows, columns = jnp.moveaxis((pixels - centre - shift) @ back.T + centre, -1, 0)

    def channel(values: Float[Array, "height width"]) -> Float[Array, "height width"]:
        return jax.scipy.ndimage.map_coordinates(values, [rows, columns], order=1)

    return jax.vmap(channel, in_axes=2, out_axes=2)(image)


def jitter_images(
    images: Float[Array, "batch height width channels"],
    key: Array,
    *,
    angle: float,
    zoom: float,
    shift: float,
) -> Float[Array, "batch height width channels"]:
    """Rotates, zooms and shifts each image at random.

    Args:
        images: a batch.
        key: of the random numbers.
        angle: the largest rotation either way, in radians.
        zoom: the largest change of scale either way: 0.1 for factors from 0.9 to 1.1.
        shift: the largest shift either way along each axis, in pixels.
    """
    limits = jnp.array([angle, zoom, shift, shift])
    drawn = limits * jax.random.uniform(key, (len(images), 4), minval=-1, maxval=1)
    return jax.vmap(lambda x, d: move_image(x, angle=d[0], zoom=1 + d[1], shift=d[2:]))(
        images, drawn
    )
