"""Images that are moved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

from constrainx.data import jitter_images, move_image

IMAGE = jax.random.uniform(jax.random.key(0), (6, 6, 2))


@pytest.mark.parametrize("quarters", range(4))
def test_quarter_turns_match_numpy(quarters):
    found = move_image(IMAGE, angle=quarters * np.pi / 2, zoom=1.0, shift=jnp.zeros(2))
    inside = (slice(1, -1), slice(1, -1))  # pixels of the rim fall out of the image by rounding
    np.testing.assert_allclose(found[inside], np.rot90(IMAGE, quarters)[inside], atol=1e-5)


def test_zoom_and_shift_match_scipy():
    zoom, shift = 1.3, np.array([0.7, -0.4])
    found = move_image(IMAGE, angle=0.0, zoom=zoom, shift=jnp.asarray(shift))
    centre = np.full(2, 2.5)
    for channel in range(2):
        wanted = scipy.ndimage.affine_transform(
            np.asarray(IMAGE[:, :, channel]),
            np.eye(2) / zoom,
            offset=centre - (centre + shift) / zoom,
            order=1,
            mode="grid-constant",
        )
        np.testing.assert_allclose(found[:, :, channel], wanted, atol=1e-5)


def test_each_image_is_moved_differently():
    images = jnp.stack([IMAGE] * 3)
    key = jax.random.key(1)
    found = jitter_images(images, key, angle=0.3, zoom=0.1, shift=0.5)
    assert jnp.abs(found[0] - found[1]).max() > 0.01
    assert jnp.abs(found - images).max() > 0.01
    same = jitter_images(images, key, angle=0.0, zoom=0.0, shift=0.0)
    np.testing.assert_allclose(same, images, atol=1e-5)
