"""Random numbers for the examples of a batch, whatever batch they are in."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int, UInt64

# The increment and the multipliers of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom
# number generators, 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Draws:
    """Random numbers for each example, as a function of a seed, its epoch and its number alone.

    So an example gets the same numbers whatever else is in its batch, and however many processes
    share the batch. Each example has a generator SplitMix64 of its own.

    >>> import numpy as np
    >>> draws = Draws(seed=0, epochs=np.array([0, 1]), examples=np.array([7, 7]))
    >>> print(draws.uniform(3).round(3))
    [[0.73  0.993 0.401]
     [0.816 0.633 0.363]]
    """

    def __init__(
        self, *, seed: int, epochs: Int[np.ndarray, " batch"], examples: Int[np.ndarray, " batch"]
    ) -> None:
        """Takes the seed, and for each example its epoch and its number in the data."""
        keys: np.ndarray = np.full(len(examples), seed, np.uint64)
        for part in (epochs, examples):
            keys = _mix(keys + _STEP) ^ part.astype(np.uint64)
        self._keys = _mix(keys + _STEP)

    def fold_in(self, number: int) -> Draws:
        """Other numbers for the same examples."""
        folded = object.__new__(Draws)
        folded._keys = _mix((self._keys ^ np.uint64(number)) + _STEP)
        return folded

    def __len__(self) -> int:
        return len(self._keys)

    def uniform(self, count: int) -> Float[np.ndarray, "batch {count}"]:
        """The first ``count`` numbers of each example, uniform in [0, 1)."""
        counters = np.arange(1, count + 1, dtype=np.uint64) * _STEP
        return (self.words(counters) >> np.uint64(11)) * 2.0**-53

    def words(self, counters: UInt64[np.ndarray, " count"]) -> UInt64[np.ndarray, "batch count"]:
        """Random words at positions of each example's generator."""
        return _mix(self._keys[:, None] + counters)


def _mix(words: UInt64[np.ndarray, ...]) -> UInt64[np.ndarray, ...]:
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
