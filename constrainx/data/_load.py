"""Small image data sets as arrays, for training from memory."""

from __future__ import annotations

import os

import numpy as np
from jaxtyping import Float, Int

from constrainx.data._source import open_source
from constrainx.errors import ArgumentError


def load_images(
    name: str,
    split: str,
    *,
    data_dir: str | os.PathLike[str] | None = None,
) -> dict[str, Float[np.ndarray, "examples h w c"] | Int[np.ndarray, " examples"]]:
    """All examples of a prepared data set with images and labels, in the order of the files.

    For data sets that fit into memory, such as Fashion-MNIST and CIFAR-10: on a few cores, decoding
    them again in each epoch would take longer than training on them.

    Args:
        name: as TFDS spells it, such as ``"fashion_mnist"``.
        split: as TFDS spells it, such as ``"train"`` or ``"train[:10%]"``.
        data_dir: where the data sets are, as in `tfds`.

    Returns:
        Images "x" with values from 0 to 1, and classes "y".

    Raises:
        DataNotFoundError: if the data set has not been prepared.
    """
    source = open_source(name, split, data_dir)
    examples = [source[i] for i in range(len(source))]
    if not examples or not {"image", "label"} <= set(examples[0]):
        raise ArgumentError(
            f"`load_images` needs examples with an image and a label, but {name!r} has "
            f"{sorted(examples[0]) if examples else 'none'}: use `tfds` with your own transforms."
        )
    return {
        "x": np.stack([example["image"] for example in examples]).astype(np.float32) / 255,
        "y": np.array([example["label"] for example in examples], np.int32),
    }
