"""The points that rows are taken at: batches of examples, each with keys of its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from constrainx.constraints import Member, find_live_inputs


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["stacks", "key"],
    meta_fields=["counts", "examples", "draws"],
)
@dataclasses.dataclass(frozen=True)
class Points:
    """Batches of one size on a first axis, a stack for each size.

    Attributes:
        stacks: the batches.
        key: all randomness comes from it.
        counts: how many batches each stack has.
        examples: how many examples each of its batches has.
        draws: how often a constraint that draws looks at each batch, with another key every time.
    """

    stacks: tuple[PyTree, ...]
    key: Array
    counts: tuple[int, ...]
    examples: tuple[int, ...]
    draws: int


class Reads(NamedTuple):
    """What the rows of a constraint depend on, besides the parameters."""

    batch: bool
    key: bool


# (batch, key) ↦ what is wanted of one batch.
Look: TypeAlias = Callable[[Any, Array], Any]


def map_points(look: Look, points: Points, reads: Reads, *, index: int) -> list[PyTree]:
    """What is found at all batches and draws that a constraint tells apart, a stack at a time.

    Several batches are looked at one after the other. What a derivative needs of them is computed
    again in each product with it, so that memory is that of one batch, however many there are.

    Args:
        look: (batch, key) ↦ arrays.
        points: where.
        reads: what that depends on.
        index: of the constraint among several, which have keys of their own.
    """
    own = jax.random.fold_in(points.key, index)
    draws = points.draws if reads.key else 1
    found, before = [], 0
    stacks = zip(points.stacks, points.counts, strict=True)
    for stack, count in stacks if reads.batch else [(points.stacks[0], 1)]:
        numbers = before * points.draws + jnp.arange(count * draws)
        before += count

        def look_at(number: Int[Array, ""], stack: PyTree = stack, first: Any = numbers[0]) -> Any:
            position = (number - first) // draws
            batch = jax.tree.map(lambda leaf: leaf[position], stack)
            return look(batch, jax.random.fold_in(own, number))

        if len(numbers) == 1:
            found.append(jax.tree.map(lambda leaf: leaf[None], look_at(numbers[0])))
        else:
            found.append(jax.lax.map(jax.checkpoint(look_at, prevent_cse=False), numbers))
    return found


def weigh_points(points: Points, reads: Reads) -> list[np.ndarray]:
    """How many examples stand behind each entry of what `map_points` returns."""
    if not reads.batch:
        return [np.ones(points.draws if reads.key else 1)]
    draws = points.draws if reads.key else 1
    pairs = zip(points.counts, points.examples, strict=True)
    return [np.full(count * draws, float(size)) for count, size in pairs]


def find_reads(member: Member, parameters: PyTree, points: Points, model: Any) -> Reads:
    """What the rows of a constraint depend on, by tracing."""
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), points.stacks[0]
    )
    closed = jax.make_jaxpr(lambda b, k: member.rows(parameters, b, k, model))(batch, points.key)
    *of_batch, of_key = find_live_inputs(closed)
    return Reads(any(of_batch), of_key)
