"""The protocol of a transform of batches, and how several are applied in turn."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jaxtyping import Int, Shaped

from constrainx.data._stopwatch import Stopwatch, name_stages
from constrainx.data.transforms._draws import Draws
from constrainx.errors import ArgumentError, ArgumentTypeError, did_you_mean

Batch = dict[str, Any]


class Transform(abc.ABC):
    """Changes all examples of a batch at once.

    What becomes of an example must depend on the example and its random numbers alone, and not on
    the rest of the batch: then a batch does not depend on the number of processes, nor on where
    training was resumed.

    >>> import dataclasses, numpy as np, constrainx as cx
    >>> @dataclasses.dataclass(frozen=True)
    ... class Noise(cx.data.transforms.Transform):
    ...     scale: float
    ...     def apply(self, batch, draws):
    ...         noise = self.scale * draws.uniform(batch["x"].shape[1])
    ...         return {**batch, "x": batch["x"] + noise}
    >>> data = cx.data.arrays({"x": np.zeros((4, 2))}, batch=2, transforms=[Noise(0.1)])
    >>> print(next(data.from_step(0))["x"].shape)
    (2, 2)

    Attributes:
        mixes: whether an example depends on its neighbour, too: the other one of the pair of
            examples 2 j and 2 j + 1 in the stream. Batches then start and end with whole pairs.
    """

    mixes: ClassVar[bool] = False

    @abc.abstractmethod
    def apply(self, batch: Batch, draws: Draws) -> Batch:
        """A changed batch of as many examples, in training.

        Args:
            batch: arrays with examples along the first axis; they may be shared, and must not be
                changed in place.
            draws: random numbers for each example.
        """

    def apply_once(self, batch: Batch) -> Batch:
        """The same without random changes, for `Batches.once`: by default, no change at all."""
        return batch


@dataclasses.dataclass(frozen=True)
class Transforms:
    """Several transforms, applied in turn.

    Attributes:
        transforms: in their order.
        seed: of their random numbers.
        watch: what times each of them, if anything does.
    """

    transforms: tuple[Transform, ...]
    seed: int
    watch: Stopwatch | None = None

    def __bool__(self) -> bool:
        return bool(self.transforms)

    def widen(self, start: int, stop: int) -> tuple[int, int]:
        """The positions in the stream that are needed to make those from ``start`` to ``stop``."""
        if not any(transform.mixes for transform in self.transforms):
            return start, stop
        return start - start % 2, stop + stop % 2

    def apply(
        self,
        batch: Any,
        *,
        epochs: Int[np.ndarray, " batch"],
        examples: Int[np.ndarray, " batch"],
    ) -> Any:
        """Changes the examples of these epochs and numbers."""
        draws = Draws(seed=self.seed, epochs=epochs, examples=examples)
        stages = name_stages(self.transforms)
        for number, transform in enumerate(self.transforms):
            arguments = (batch, draws.fold_in(number))
            if self.watch is None:
                batch = transform.apply(*arguments)
            else:
                batch = self.watch.time(stages[number], transform.apply, *arguments)
            _check_count(batch, len(draws), transform)
        return batch

    def apply_once(self, batch: Any) -> Any:
        """Changes examples without randomness."""
        for transform in self.transforms:
            batch = transform.apply_once(batch)
        return batch


def cut_rows(batch: Any, rows: slice) -> Any:
    """Some rows of a batch, without a copy if they are all of it."""
    return jax.tree.map(
        lambda leaf: leaf if len(leaf) == rows.stop - rows.start else leaf[rows], batch
    )


def _check_count(batch: Any, count: int, transform: Transform) -> None:
    for name, leaf in batch.items():
        for part in jax.tree.leaves(leaf, is_leaf=lambda x: isinstance(x, list)):
            if len(part) != count:
                raise ArgumentError(
                    f"{type(transform).__name__} must return as many examples as it was given, "
                    f"{count}, got {len(part)} in {name!r}."
                )


def check_transforms(transforms: Any, *, fix: str = "") -> tuple[Transform, ...]:
    """The transforms, if that is what they are."""
    if isinstance(transforms, Transform) or not isinstance(transforms, Sequence):
        raise ArgumentTypeError(f"`transforms` must be a list of transforms, got {transforms!r}.")
    for transform in transforms:
        if not isinstance(transform, Transform):
            raise ArgumentTypeError(
                "`transforms` must be transforms of batches, such as "
                f"`cx.data.transforms.RandomFlip()`, got {transform!r}.{fix}"
            )
    return tuple(transforms)


def check_probability(value: Any, *, argument: str) -> None:
    """Raises unless it is a number from 0 to 1."""
    is_number = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise ArgumentError(f"`{argument}` must be a number from 0 to 1, got {value!r}.")


def find_entry(batch: Any, name: str, *, argument: str) -> Any:
    """An entry of a batch, or an error that names those that there are."""
    if not isinstance(batch, dict):
        raise ArgumentTypeError(
            f"transforms need batches that are dictionaries, got {type(batch).__name__}. Name the "
            "parts, as in {'x': x, 'y': y}."
        )
    if name not in batch:
        raise ArgumentError(
            f"`{argument}={name!r}` must name an entry of the batch, which has "
            f"{', '.join(map(repr, batch))}.{did_you_mean(name, batch)}"
        )
    return batch[name]


def find_images(batch: Any, name: str) -> Shaped[np.ndarray, "batch height width channels"]:
    """The images of a batch."""
    images = find_entry(batch, name, argument="images")
    if not isinstance(images, np.ndarray) or images.ndim != 4:
        what = f"shape {images.shape}" if isinstance(images, np.ndarray) else "images of many sizes"
        raise ArgumentError(
            f"the images {name!r} must have the axes (batch, height, width, channels), got {what}. "
            "Bring them to one size with `RandomResizedCrop`, or add an axis of channels."
        )
    return images
