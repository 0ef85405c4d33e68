"""Mixtures of two images and their labels."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import scipy.special
from jaxtyping import Float, Shaped

from constrainx.data.transforms._boxes import Boxes, find_inside
from constrainx.data.transforms._draws import Draws
from constrainx.data.transforms._resize import to_dtype
from constrainx.data.transforms._transform import (
    Batch,
    Transform,
    check_probability,
    find_entry,
    find_images,
)
from constrainx.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class MixImages(Transform):
    """Mixes each image with its neighbour, by mixup or CutMix, and makes labels soft.

    Of the shares λ ~ Beta(α, α) of an image and 1 − λ of the other one, mixup (Zhang et al.,
    arXiv:1710.09412) makes λ x + (1 − λ) x̃. CutMix (Yun et al., arXiv:1905.04899) replaces a
    rectangle of that share 1 − λ, at a random place and cut off at the edges; λ is then the share
    that is left. The labels become λ e_y + (1 − λ) e_ỹ, in float32, in every image.

    The two images are those at 2 j and 2 j + 1 of the stream, which is a random pair if the data is
    shuffled; each has a λ of its own. In `Batches.once` labels stay integers.

    Attributes:
        classes: how many there are.
        mixup: its α; zero for none.
        cutmix: its α; zero for none.
        switch: with both, the share of CutMix.
        probability: that an image is mixed at all.
        smoothing: how much of each label is spread evenly over all classes.
        images: the entry of the batch that has the images, (batch, height, width, channels).
        labels: the entry that has their classes.
    """

    classes: int
    mixup: float = 0.8
    cutmix: float = 1.0
    switch: float = 0.5
    probability: float = 1.0
    smoothing: float = 0.0
    images: str = "x"
    labels: str = "y"
    mixes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.classes, bool) or not isinstance(self.classes, int) or self.classes < 2:
            raise ArgumentError(f"`MixImages(classes={self.classes!r})` must be 2 or more.")
        for name in ("switch", "probability", "smoothing"):
            check_probability(getattr(self, name), argument=f"MixImages({name}=...)")
        if not (min(self.mixup, self.cutmix) >= 0 and np.isfinite(self.mixup + self.cutmix)):
            raise ArgumentError(
                "`MixImages(mixup=, cutmix=)` must be finite numbers, 0 or more, got "
                f"{self.mixup!r} and {self.cutmix!r}."
            )
        if self.mixup == self.cutmix == 0:
            raise ArgumentError("`MixImages(mixup=0, cutmix=0)` mixes nothing: leave it out.")

    def apply(self, batch: Batch, draws: Draws) -> Batch:
        """Mixes neighbours."""
        images = find_images(batch, self.images)
        labels = self._soften(find_entry(batch, self.labels, argument="labels"))
        mixed, kind, number, *place = draws.uniform(5).T
        cuts = kind < self._share_of_cuts
        share = np.where(cuts, _draw_beta(self.cutmix, number), _draw_beta(self.mixup, number))
        share = np.where(mixed < self.probability, share, 1.0)
        others = exchange_neighbours(images)
        boxes = _place_boxes(share, place, images.shape[1:3])
        inside = find_inside(boxes, images.shape[1:3])
        left = 1 - inside.mean(axis=(1, 2))
        cut = np.where((inside & cuts[:, None, None])[..., None], others, images)
        blend = np.where(cuts, 1.0, share)[:, None, None, None].astype(np.float32)
        result = cut
        if not cuts.all():
            result = to_dtype(blend * cut + (1 - blend) * others, images.dtype)
        share = np.where(cuts, left, share)[:, None].astype(np.float32)
        soft = share * labels + (1 - share) * exchange_neighbours(labels)
        return {**batch, self.images: result, self.labels: soft}

    @property
    def _share_of_cuts(self) -> float:
        return self.switch if self.mixup and self.cutmix else float(self.cutmix > 0)

    def _soften(self, labels: np.ndarray) -> Float[np.ndarray, "batch classes"]:
        if labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer):
            if labels.size and not 0 <= labels.min() <= labels.max() < self.classes:
                raise ArgumentError(
                    f"the labels {self.labels!r} must be from 0 to {self.classes - 1}, since "
                    f"`MixImages(classes={self.classes})`, got {labels.min()} to {labels.max()}."
                )
            exact = np.eye(self.classes, dtype=np.float32)[labels]
            return (1 - self.smoothing) * exact + np.float32(self.smoothing / self.classes)
        raise ArgumentError(
            f"the labels {self.labels!r} must be whole numbers, one for each image, got "
            f"{labels.dtype}{list(labels.shape)}."
        )


def exchange_neighbours(
    values: Shaped[np.ndarray, "batch ..."],
) -> Shaped[np.ndarray, "batch ..."]:
    """Each pair of examples in the other order."""
    pairs = values.reshape(len(values) // 2, 2, *values.shape[1:])
    return pairs[:, ::-1].reshape(values.shape)


def _draw_beta(alpha: float, number: Float[np.ndarray, " batch"]) -> Float[np.ndarray, " batch"]:
    """Beta(α, α), by the inverse of its distribution function."""
    if alpha == 0:
        return np.ones_like(number)
    return scipy.special.betaincinv(alpha, alpha, number)


def _place_boxes(
    share: Float[np.ndarray, " batch"], place: list[np.ndarray], size: tuple[int, int]
) -> Boxes:
    """Rectangles of the image's own ratio, around a random point and cut off at the edges."""
    edges = []
    for number, length in zip(place, size, strict=True):
        half = (np.sqrt(1 - share) * length).astype(np.int64) // 2
        centre = (number * length).astype(np.int64)
        edges.append((np.maximum(centre - half, 0), np.minimum(centre + half, length)))
    (top, bottom), (left, right) = edges
    return Boxes(top, left, bottom - top, right - left, np.ones(len(share), bool))
