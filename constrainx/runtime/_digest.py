"""Digests of arrays, which are the same however an array is split over devices and processes.

With w_i the words of an array in order, as unsigned integers of at most 32 bits, the digest is

    Σ_i r(i div n) k(i mod n) w_i   mod 2⁶⁴,

where k and r are fixed odd pseudorandom numbers of 64 bits. A sum over all words is the sum of
those over the parts that devices hold, so nobody needs the whole array. One word that changes
always changes the digest, because odd numbers can be inverted; other damage does with a probability
of about 1 − 2⁻³². This finds damage; it does not protect against forgery.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

# Where a part begins in the whole array, and what is in it.
Part: TypeAlias = tuple[tuple[int, ...], np.ndarray]
MODULUS = 2**64
# How many words share the numbers k: a block of 64 kB stays in the processor's cache.
PERIOD = 2**14


def parts_held_here(array: jax.Array | np.ndarray) -> list[Part]:
    """The parts of an array that this process counts; over all processes, each word is in one.

    On a CPU these are the array's own buffers and not copies. They stay what they are if the array
    is donated later, since nobody may overwrite a buffer that NumPy refers to.
    """
    if not isinstance(array, jax.Array):
        return [((0,) * array.ndim, array)]
    return [
        (tuple(one.start or 0 for one in shard.index), np.asarray(shard.data))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def digest_parts(shape: Sequence[int], parts: Sequence[Part]) -> int:
    """The sum over these parts of an array of this shape; see the top of this file."""
    return sum(_digest_part(tuple(shape), start, part) for start, part in parts) % MODULUS


def _digest_part(shape: tuple[int, ...], start: tuple[int, ...], part: np.ndarray) -> int:
    if part.size == 0:
        return 0
    words_each = max(1, part.dtype.itemsize // 4)
    words = np.ascontiguousarray(part).reshape(-1).view(f"u{part.dtype.itemsize // words_each}")
    # Words that follow each other in the part do so in the array, too, as far as the last axis that
    # is split.
    split = [axis for axis, size in enumerate(part.shape) if size != shape[axis]]
    axis = split[-1] if split else 0
    strides = [math.prod(shape[later + 1 :]) for later in range(len(shape))]
    first = sum(begin * stride for begin, stride in zip(start, strides, strict=True))
    length = math.prod(part.shape[axis:])
    total = 0
    for number, position in enumerate(itertools.product(*map(range, part.shape[:axis]))):
        offset = first + sum(n * stride for n, stride in zip(position, strides, strict=False))
        run = words[number * length * words_each : (number + 1) * length * words_each]
        total += _digest_run(run, offset * words_each)
    return total


def _digest_run(words: np.ndarray, start: int) -> int:
    """The sum over words that follow each other, the first of which has this number."""
    keys = _column_keys()
    row, column = divmod(start, PERIOD)
    begin = 0
    sums, rows = [], []
    if column:
        begin = min(PERIOD - column, len(words))
        sums.append(_dot(words[None, :begin], keys[column : column + begin]))
        rows.append(np.array([row]))
        row += 1
    whole = (len(words) - begin) // PERIOD
    end = begin + whole * PERIOD
    if whole:
        sums.append(_dot(words[begin:end].reshape(whole, PERIOD), keys))
        rows.append(row + np.arange(whole))
    if end < len(words):
        sums.append(_dot(words[None, end:], keys[: len(words) - end]))
        rows.append(np.array([row + whole]))
    products = np.concatenate(sums) * _scramble(np.concatenate(rows).astype(np.uint64) + _ROW_SALT)
    return int(np.add.reduce(products))


def _dot(words: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return np.einsum("ij,j->i", words, keys, dtype=np.uint64, casting="safe")


@functools.cache
def _column_keys() -> np.ndarray:
    return _scramble(np.arange(PERIOD, dtype=np.uint64))


# So that no number of a row is one of a column.
_ROW_SALT = np.uint64(2**63)


def _scramble(numbers: np.ndarray) -> np.ndarray:
    """Odd pseudorandom numbers, by the last steps of SplitMix64 (Steele, Lea and Flood, 2014)."""
    z = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31)) | np.uint64(1)


def digest_array(array: Any) -> int:
    """The digest of an array that this process holds in full."""
    return digest_parts(array.shape, parts_held_here(array))
