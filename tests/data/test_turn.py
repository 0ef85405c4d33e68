"""Images turned by one angle."""

import numpy as np
import scipy.ndimage

from constrainx.data import turn_images


def test_images_turn_as_scipy_turns_them():
    images = np.random.default_rng(0).random((3, 9, 9, 1), np.float32)
    for degrees in (40.0, 160.0):
        wanted = scipy.ndimage.rotate(
            images, degrees, axes=(1, 2), reshape=False, order=1, mode="constant", prefilter=False
        )
        # At the border, SciPy takes a pixel from just outside to be outside altogether.
        inside = (slice(None), slice(2, -2), slice(2, -2))
        np.testing.assert_allclose(turn_images(images, degrees)[inside], wanted[inside], atol=1e-5)
    np.testing.assert_allclose(turn_images(images, 90.0), np.rot90(images, axes=(1, 2)), atol=1e-5)
