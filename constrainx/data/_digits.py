"""The handwritten digits that come with scikit-learn: 1797 images of 8 × 8 pixels, no download."""

from __future__ import annotations

import numpy as np

from constrainx.errors import ArgumentError, MissingPackageError


def digits(tests: int, *, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Training and test images in [0, 1] with their labels, split at random.

    Args:
        tests: the number of images to hold out.
        seed: of the random split.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingPackageError(
            "`digits` needs scikit-learn, which brings the images: pip install "
            "'constrainx[science]'."
        ) from error
    images, labels = load_digits(return_X_y=True)
    if not 0 < tests < len(labels):
        raise ArgumentError(f"`tests` must be between 1 and {len(labels) - 1}, got {tests!r}.")
    order = np.random.default_rng([seed, 64]).permutation(len(labels))
    x = (images[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    y = labels[order].astype(np.int32)
    return {"x": x[tests:], "y": y[tests:]}, {"x": x[:tests], "y": y[:tests]}
