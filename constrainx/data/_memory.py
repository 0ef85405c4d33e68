"""Examples that a model remembers, as a part of its state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from constrainx.data._batches import check_batch
from constrainx.data._reservoir import Reservoir, draw_examples
from constrainx.errors import ArgumentError, did_you_mean


class Remembered(nnx.Variable):
    """An array of a `Memory`; it is not trained."""


class Memory(nnx.Module):
    """A sample of the examples that have passed by, of fixed size, with what belongs to them.

    It is a part of the model: a loss adds the batch to it, checkpoints hold it, and a run that
    resumes has the same examples, bit for bit. `Unchanged` draws from it. Each example may have
    entries that are filled in later, such as outputs.

    >>> import jax, jax.numpy as jnp, constrainx as cx
    >>> from flax import nnx
    >>> memory = cx.data.Memory(100, x=jnp.zeros(3), outputs=jnp.zeros(2))
    >>> memory.add(jax.random.key(0), x=jnp.ones((8, 3)), outputs=jnp.ones((8, 2)))
    >>> drawn, weights = memory.draw(4, jax.random.key(1))
    >>> print(drawn["x"].shape, weights, memory.seen[...])
    (4, 3) [1. 1. 1. 1.] 8

    Args:
        size: how many examples it holds.
        only: the name of an entry: `draw` and `everything` leave out examples where it is zero,
            such as those whose outputs are not known yet.
        **example: for each entry one example of it, or its shape, without an axis for the batch.
    """

    def __init__(self, size: int, *, only: str | None = None, **example: Any) -> None:
        check_batch(size)
        if not example:
            raise ArgumentError("`Memory` needs the entries of an example, as in `x=x[0]`.")
        if only is not None and only not in example:
            raise ArgumentError(
                f"`Memory(only={only!r})` must be one of the entries {sorted(example)}."
                f"{did_you_mean(only, example)}"
            )
        empty = Reservoir.empty(example, size=size)
        self.only = only
        self.entries = nnx.Dict({name: Remembered(leaf) for name, leaf in empty.examples.items()})
        self.seen = Remembered(empty.seen)

    @property
    def size(self) -> int:
        """How many examples it can hold."""
        return self._reservoir.size

    @property
    def is_filled(self) -> Bool[Array, " size"]:
        """Which places hold an example."""
        return self._reservoir.is_filled

    def __getitem__(self, name: str) -> Array:
        """The values of an entry, a place along the first axis for each example."""
        self._check(name)
        return self.entries[name][...]

    def add(self, key: Array, **batch: Array) -> None:
        """Takes a sample of a batch in, in the place of others.

        After this, each example that has ever been added is there with the same probability.

        Args:
            key: a new one each time.
            **batch: values of the entries; those left out are zero for the new examples.
        """
        for name in batch:
            self._check(name)
        if not batch:
            raise ArgumentError("`Memory.add` needs at least one entry of the examples.")
        count = next(iter(batch.values())).shape[0]
        held = self._reservoir
        full = {
            name: batch.get(name, jnp.zeros((count, *leaf.shape[1:]), leaf.dtype))
            for name, leaf in held.examples.items()
        }
        for name, leaf in full.items():
            wanted = (count, *held.examples[name].shape[1:])
            if np.shape(leaf) != wanted:
                raise ArgumentError(
                    f"`Memory.add({name}=...)` must have the shape {wanted}, got {np.shape(leaf)}."
                )
        self._write(held.add(jax.lax.stop_gradient(full), key))

    def replace(self, **entries: Array) -> None:
        """Overwrites entries of all examples, such as outputs that are known now."""
        held = self._reservoir
        for name, leaf in entries.items():
            self._check(name)
            wanted = held.examples[name].shape
            if np.shape(leaf) != wanted:
                raise ArgumentError(
                    f"`Memory.replace({name}=...)` must have the shape {wanted}, got "
                    f"{np.shape(leaf)}."
                )
        self._write(held._replace(examples={**held.examples, **jax.lax.stop_gradient(entries)}))

    def draw(self, count: int, key: Array) -> tuple[dict[str, Array], Float[Array, " count"]]:
        """So many different examples, at random, and a weight for each: zero if there is none."""
        if count > self.size:
            raise ArgumentError(
                f"a memory of {self.size} examples was asked for {count} of them: draw fewer, or "
                "make it larger."
            )
        return draw_examples(self._reservoir.examples, self._allowed, count, key)

    def everything(self) -> tuple[dict[str, Array], Float[Array, " size"]]:
        """All places, and a weight for each: zero if there is no example."""
        return dict(self._reservoir.examples), self._allowed.astype(jnp.float32)

    @property
    def _allowed(self) -> Bool[Array, " size"]:
        return self.is_filled if self.only is None else self.is_filled & (self[self.only] != 0)

    @property
    def _reservoir(self) -> Reservoir:
        examples = {name: variable[...] for name, variable in self.entries.items()}
        return Reservoir(examples, self.seen[...])

    def _write(self, held: Reservoir) -> None:
        for name, leaf in held.examples.items():
            variable = self.entries[name]
            variable[...] = jnp.asarray(leaf, variable[...].dtype)
        self.seen[...] = held.seen

    def _check(self, name: str) -> None:
        names = list(self.entries)
        if name not in names:
            raise ArgumentError(
                f"the memory has the entries {sorted(names)}, got {name!r}."
                f"{did_you_mean(name, names)}"
            )
