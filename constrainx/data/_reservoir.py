"""A uniform sample, of fixed size, of all examples that have passed by."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

# Examples are counted in 32 bits. From here on the count stands still, so that later examples are
# taken a little more often than they should be.
MOST_SEEN = 2**30


class Reservoir(NamedTuple):
    """So many examples of a stream, of which each is there with the same probability.

    Its arrays are all of its state, and what it becomes is a function of them, the examples and a
    key. It works inside of `jax.jit`.

    >>> import jax, jax.numpy as jnp
    >>> from constrainx.data import Reservoir
    >>> reservoir = Reservoir.empty(jnp.zeros(()), size=3)
    >>> for step in range(4):
    ...     batch = 10.0 * step + jnp.arange(5.0)
    ...     reservoir = reservoir.add(batch, jax.random.fold_in(jax.random.key(0), step))
    >>> print(reservoir.seen, reservoir.examples.shape)
    20 (3,)

    Attributes:
        examples: arrays with the places along the first axis.
        seen: how many examples have passed by.
    """

    examples: PyTree[Array]
    seen: Int[Array, ""]

    @classmethod
    def empty(cls, example: PyTree, *, size: int) -> Reservoir:
        """One with no examples yet.

        Args:
            example: one example, or its shapes: without an axis for the batch.
            size: how many it holds.
        """
        examples = jax.tree.map(
            lambda leaf: jnp.zeros((size, *np.shape(leaf)), jnp.result_type(leaf)), example
        )
        return cls(examples, jnp.zeros((), jnp.int32))

    @property
    def size(self) -> int:
        """How many examples it can hold."""
        return jax.tree.leaves(self.examples)[0].shape[0]

    @property
    def is_filled(self) -> Bool[Array, " size"]:
        """Which places hold an example."""
        return jnp.arange(self.size) < self.seen

    def add(self, batch: PyTree[Array], key: Array) -> Reservoir:
        """The sample after these examples.

        Example t of the stream, counted from zero, takes place t as long as there is one, and
        after that a random place of t + 1, if it is one of ours (algorithm R). Examples of one
        batch that draw the same place follow each other, so the last one stays.
        """
        count = jax.tree.leaves(batch)[0].shape[0]
        order = jnp.arange(count)
        position = self.seen + order
        drawn = jax.random.randint(key, (count,), 0, position + 1)
        place = jnp.where(position < self.size, position, drawn)
        # One place more for those that are not taken.
        place = jnp.minimum(place, self.size)
        last = jax.ops.segment_max(order, place, num_segments=self.size + 1)[:-1]
        is_new = last >= 0

        def replace(old: Array, new: Array) -> Array:
            mask = is_new.reshape(-1, *(1,) * (old.ndim - 1))
            return jnp.where(mask, new[jnp.maximum(last, 0)], old).astype(old.dtype)

        examples = jax.tree.map(replace, self.examples, batch)
        return Reservoir(examples, jnp.minimum(self.seen + count, MOST_SEEN))


def draw_examples(
    examples: PyTree[Array], allowed: Bool[Array, " size"], count: int, key: Array
) -> tuple[PyTree[Array], Float[Array, " count"]]:
    """So many different examples of those allowed, at random, and a weight for each.

    If fewer are allowed, others fill the rest, with a weight of zero.
    """
    scores = jnp.where(allowed, jax.random.uniform(key, allowed.shape), -1)
    _, chosen = jax.lax.top_k(scores, count)
    drawn = jax.tree.map(lambda leaf: leaf[chosen], examples)
    return drawn, allowed[chosen].astype(jnp.float32)
