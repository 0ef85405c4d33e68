"""How many small images a second the augmentations make, without a model behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

import constrainx as cx
from benchmarks.measure import best_times
from benchmarks.report import Goal, Report, Table
from constrainx.data import transforms

BATCH, CLASSES, GOAL = 128, 10, 5000
NORMALISE = transforms.Normalise((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
USUAL = "crop, flip, normalise"
PIPELINES: dict[str, tuple[transforms.Transform, ...]] = {
    "none": (),
    "RandomCrop": (transforms.RandomCrop(),),
    "RandomFlip": (transforms.RandomFlip(),),
    "RandAugment": (transforms.RandAugment(),),
    "RandomErasing": (transforms.RandomErasing(),),
    "MixImages": (transforms.MixImages(CLASSES),),
    "Normalise": (NORMALISE,),
    USUAL: (transforms.RandomCrop(), transforms.RandomFlip(), NORMALISE),
    "all": (
        transforms.RandomCrop(),
        transforms.RandomFlip(),
        transforms.RandAugment(),
        NORMALISE,
        transforms.RandomErasing(),
        transforms.MixImages(CLASSES),
    ),
}


def run(*, quick: bool) -> Report:
    """Times each transform by itself, and together, on bytes and on numbers from 0 to 1."""
    count, batches, rounds = (256, 1, 1) if quick else (10_000, 16, 7)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 32, 32, 3)).astype(np.uint8)
    labels = rng.integers(0, CLASSES, count).astype(np.int32)
    kinds = {"bytes": images, "float32": images.astype(np.float32) / 255}
    calls = {
        f"{name}/{kind}": _reader({"x": array, "y": labels}, chosen, batches)
        for name, chosen in PIPELINES.items()
        for kind, array in kinds.items()
    }
    seconds = best_times(calls, rounds=rounds)
    rates = {name: batches * BATCH / one for name, one in seconds.items()}
    slowest = min(rates[f"{USUAL}/{kind}"] for kind in kinds)
    return Report(
        name="images",
        setting=f"{count} images of 32 × 32 × 3 in memory, batch {BATCH}, one thread, best of "
        f"{rounds} times {batches} batches, reading included.",
        tables=[
            Table(
                "Images a second",
                {"transforms": "", **dict.fromkeys(kinds, ",.0f")},
                [(name, *(rates[f"{name}/{kind}"] for kind in kinds)) for name in PIPELINES],
            )
        ],
        goals=[]
        if quick
        else [
            Goal(
                f"{USUAL}: at least {GOAL:,} images a second",
                f"{slowest:,.0f}",
                slowest >= GOAL,
            )
        ],
    )


def _reader(
    arrays: dict[str, np.ndarray], chosen: tuple[transforms.Transform, ...], batches: int
) -> Callable[[], None]:
    """Reads the next batches at each call."""
    iterator = cx.data.arrays(arrays, batch=BATCH, transforms=chosen).from_step(0)

    def read() -> None:
        for _ in itertools.islice(iterator, batches):
            pass

    return read
