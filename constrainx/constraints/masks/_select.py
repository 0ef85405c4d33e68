"""Choosing the largest of many numbers that lie in several arrays, without sorting them.

Sorting fifty million numbers takes longer than a training step, and on several devices it would
gather them all on each. A sorted sample says nearly where to cut, and counting how many numbers lie
above a cut, which is one pass over them and one number from each device, says the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from constrainx.constraints._explicit import replicate

Arrays: TypeAlias = Sequence[Float[Array, "..."]]

# As many are sorted; up to here a cut is exact.
SORTED = 2**15
# As many are counted to correct a cut: with these it is off by 3e-4 of all numbers or so.
COUNTED = 2**21
CORRECTIONS = 3
LARGEST = np.uint32(2**32 - 1)


def find_cut(values: Arrays, count: int | Int[Array, ""]) -> Float[Array, ""]:
    """Returns the number that about ``count`` of the values reach or exceed.

    Exact for few values. For many it comes from a sample of them, and is off by a few of ten
    thousand: cheap enough for every step. Equal values stay together.

    Args:
        values: arrays of any shapes; all of them together are compared.
        count: how many should reach it.
    """
    share = jnp.asarray(count) / _total(values)
    return _cut_sample(_take_some(values, SORTED), _take_some(values, COUNTED), share)


def find_expected_cut(probabilities: Arrays) -> Float[Array, ""]:
    """Returns the probability that as many reach as the probabilities add up to, or nearly.

    It is above 0 and at most 1: what is certain to stay or to go is not more than one expects.
    """
    counted = _take_some(probabilities, COUNTED)
    share = jnp.mean(jnp.clip(counted, 0, 1))
    cut = _cut_sample(_take_some(probabilities, SORTED), counted, share)
    return jnp.clip(cut, jnp.finfo(cut.dtype).tiny, 1)


def _cut_sample(
    few: Float[Array, " few"], many: Float[Array, " many"], share: Float[Array, ""]
) -> Float[Array, ""]:
    """The one of a few numbers that comes closest to cutting off a share of many."""
    ascending = jnp.sort(few)
    size = ascending.size

    def cut_at(share: Array) -> Float[Array, ""]:
        index = size - jnp.round(share * size).astype(jnp.int32)
        inside = ascending[jnp.clip(index, 0, size - 1)]
        return jnp.where(index >= size, jnp.inf, jnp.where(index <= 0, -jnp.inf, inside))

    def find_excess(cut: Array) -> Float[Array, ""]:
        return jnp.mean(jnp.where(many >= cut, 1.0, 0.0)) - share

    aim, best, miss = share, cut_at(share), jnp.full_like(share, jnp.inf)
    if many.size > size:
        # A sample is hardly off by more. Where many numbers are equal, the share above a cut jumps,
        # and says no more than the direction.
        spread = 4 * jnp.sqrt(share * (1 - share) / size) + 2 / size
        for _ in range(CORRECTIONS):
            cut = cut_at(aim)
            excess = find_excess(cut)
            best = jnp.where(jnp.abs(excess) < miss, cut, best)
            miss = jnp.minimum(jnp.abs(excess), miss)
            aim = jnp.clip(aim - jnp.clip(excess, -spread, spread), 0, 1)
    # All that equal the cut stay; without them it may be closer.
    after = jnp.searchsorted(ascending, best, side="right")
    above = jnp.where(after < size, ascending[jnp.clip(after, 0, size - 1)], jnp.inf)
    is_closer = jnp.abs(find_excess(above)) < jnp.abs(find_excess(best))
    return jnp.where(is_closer, above, best)


def keep_largest(
    values: Arrays, ties: Arrays, count: int | Int[Array, ""]
) -> list[Bool[Array, ...]]:
    """Marks exactly ``count`` of the values: the largest.

    Among equal ones those with the larger ``ties`` are marked, then the earlier ones. About twenty
    passes over the values.

    Args:
        values: arrays of any shapes; all of them together are compared.
        ties: arrays of the same shapes.
        count: how many to mark, at most as many as there are.
    """
    count = jnp.asarray(count, jnp.int32)
    # Compiling takes time for each array, not for its size; networks repeat their shapes.
    places = _group_shapes(values)
    backwards = _number_backwards(values, places)
    values, ties = _stack(values, places), _stack(ties, places)
    keys = [_as_ordered(value) for value in values]
    threshold = _find_threshold(keys, count, near=_as_ordered(find_cut(values, count)))
    chosen = [key > threshold for key in keys]
    level = [key == threshold for key in keys]
    left = count - _count(chosen)

    def break_ties() -> list[Bool[Array, ...]]:
        # What is not level must not count: zero is below all others.
        ordered = [_as_ordered(tie) for tie in ties]
        first = [jnp.where(flag, key, 0) for flag, key in zip(level, ordered, strict=True)]
        most = _find_threshold(first, left)
        above = [key > most for key in first]
        still = [flag & (key == most) for flag, key in zip(level, first, strict=True)]
        last = [jnp.where(flag, key, 0) for flag, key in zip(still, backwards, strict=True)]
        # All of these are different, so exactly as many as are missing are above.
        nearest = _find_threshold(last, left - _count(above))
        return [a | (key > nearest) for a, key in zip(above, last, strict=True)]

    needed = (left > 0) & (left < _count(level))
    rest = jax.lax.cond(needed, break_ties, lambda: [flag & (left > 0) for flag in level])
    kept = [one | other for one, other in zip(chosen, rest, strict=True)]
    flags = {i: stack[k] for stack, at in zip(kept, places, strict=True) for k, i in enumerate(at)}
    return [flags[i] for i in range(len(flags))]


def _find_threshold(
    keys: Sequence[UInt32[Array, ...]], count: Int[Array, ""], near: Array | None = None
) -> UInt32[Array, ""]:
    """The smallest t with at most ``count`` of the keys above it, by bisection.

    Args:
        keys: whole numbers.
        count: how many may be above.
        near: a guess; the search begins with growing steps from there.
    """

    def is_enough(t: Array) -> Bool[Array, ""]:
        return _count([key > t for key in keys]) <= count

    low, high = jnp.zeros((), jnp.uint32), jnp.full((), LARGEST, jnp.uint32)
    if near is not None:
        # The answer is above `low` unless it is zero, and at most `high`.
        def leap(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            low, high, step, _ = state
            below = jnp.where(near > step, near - step, 0)
            above = jnp.where(near < LARGEST - step, near + step, LARGEST)
            reached, exceeded = is_enough(above), ~is_enough(below)
            low = jnp.where(exceeded, jnp.maximum(low, below), low)
            high = jnp.where(reached, jnp.minimum(high, above), high)
            at_end = step >= jnp.uint32(2**31)
            return low, high, step * 256, (reached & (exceeded | (below == 0))) | at_end

        start = (low, high, jnp.full((), 2**7, jnp.uint32), jnp.zeros((), bool))
        low, high, *_ = jax.lax.while_loop(lambda s: ~s[3], leap, start)

    def halve(state: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = state
        middle = low + (high - low) // 2
        enough = is_enough(middle)
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    return jax.lax.while_loop(lambda s: s[0] < s[1], halve, (low, high))[1]


def _take_some(values: Arrays, most: int) -> Float[Array, " some"]:
    """All values in one array, or evenly spread ones if there are more than about ``most``."""
    stride = max(1, _total(values) // most)
    # An odd stride does not stay in the same few columns of a kernel.
    stride += 1 - stride % 2
    return jnp.concatenate([_take_every(replicate(value), stride) for value in values])


def _take_every(value: Float[Array, ...], stride: int) -> Float[Array, " some"]:
    """``value.reshape(-1)[::stride]``, of which devices that share the value exchange no more.

    For the reshape XLA would gather all of it on each of them.
    """
    if stride == 1:
        return value.reshape(-1)
    # Behind a barrier, or XLA would compute millions of positions as it compiles.
    count = jax.lax.optimization_barrier(jnp.arange(-(-value.size // stride), dtype=jnp.int32))
    where = jnp.unravel_index(count * stride, value.shape)
    return value.at[where].get(
        mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True
    )


def _total(values: Arrays) -> int:
    return sum(value.size for value in values)


def _as_ordered(values: Float[Array, ...]) -> UInt32[Array, ...]:
    """Whole numbers above zero in the same order as the values; NaN is the smallest."""
    values = jnp.where(jnp.isnan(values), -jnp.inf, values).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0, values), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(2**31))


def _group_shapes(values: Arrays) -> list[list[int]]:
    """Which of the values have the same shape."""
    places: dict[tuple[int, ...], list[int]] = {}
    for index, value in enumerate(values):
        places.setdefault(value.shape, []).append(index)
    return list(places.values())


def _stack(values: Arrays, places: list[list[int]]) -> list[Float[Array, ...]]:
    return [jnp.stack([values[i] for i in group]) for group in places]


def _number_backwards(values: Arrays, places: list[list[int]]) -> list[UInt32[Array, ...]]:
    """The position of each number among all, counted from the end, for values stacked by shape."""
    ends = np.cumsum([value.size for value in values][::-1], dtype=np.uint32)[::-1]
    numbered = []
    for group in places:
        shape = values[group[0]].shape
        end = jnp.asarray(ends[group]).reshape(-1, *(1 for _ in shape))
        numbered.append(end - _find_positions(shape))
    return numbered


def _find_positions(shape: tuple[int, ...]) -> UInt32[Array, ...]:
    """The position of each entry, without a reshape that would move them between devices."""
    position, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        position, stride = position + along * jnp.uint32(stride), stride * shape[axis]
    return position


def _count(flags: Sequence[Bool[Array, ...]]) -> Int[Array, ""]:
    return sum((jnp.sum(flag, dtype=jnp.int32) for flag in flags), jnp.zeros((), jnp.int32))
