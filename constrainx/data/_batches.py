"""Batches as a pure function of the step, which is what a trainer iterates over."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from constrainx.data._stopwatch import Stopwatch
from constrainx.errors import ArgumentError, ArgumentTypeError

MASK = "mask"


class Batches(abc.ABC):
    """An endless stream of batches that can be read from any step.

    The global batch of a step does not depend on the number of processes. Process p of P gets the
    contiguous rows [p·b, (p+1)·b) of it, where b = batch / P, so that the rows of all processes, in
    order, are the global batch.

    Iterators may own threads or worker processes: close them, for example by `contextlib.closing`.

    Attributes:
        batch: the size of the global batch.
        examples: the number of examples in one pass, or None if the data has no end.
    """

    batch: int
    examples: int | None

    @property
    def is_cheap(self) -> bool:
        """Whether making a batch takes less time than handing it over from a thread would."""
        return False

    def timed_by(self, watch: Stopwatch) -> Batches:
        """The same batches, made in one thread, with their stages timed as far as they are known.

        By default none is, and all of the time is that of reading.
        """
        del watch
        return self

    @abc.abstractmethod
    def from_step(
        self, step: int, *, process: int = 0, processes: int = 1
    ) -> Iterator[PyTree[np.ndarray]]:
        """The batches of steps ``step``, ``step + 1``, …, without end.

        Args:
            step: the first step, counted from zero.
            process: the index of this process.
            processes: how many processes share each batch.

        Returns:
            This process's rows of each batch.
        """

    @abc.abstractmethod
    def once(self, *, batch: int, process: int = 0, processes: int = 1) -> Iterator[dict[str, Any]]:
        """Every example once, in order and without random changes.

        The last batch is padded by repeating its last example. Each batch has an entry
        ``"mask"`` in float32: one for real rows, zero for padding.

        Args:
            batch: the size of the global batch, which may differ from that of training.
            process: the index of this process.
            processes: how many processes share each batch.

        Returns:
            This process's rows of each batch; all processes have the same number of batches.
        """


def local_rows(process: int, *, processes: int, batch: int) -> slice:
    """The rows of a global batch that belong to one process."""
    if processes < 1 or not 0 <= process < processes:
        raise ArgumentError(
            f"`process` must be at least 0 and below `processes`, got process {process} of "
            f"{processes}. Use jax.process_index() and jax.process_count()."
        )
    check_batch(batch)
    rows, left = divmod(batch, processes)
    if left:
        above = (rows + 1) * processes
        nearest = f"{rows * processes} or {above}" if rows else f"{above}"
        raise ArgumentError(
            f"`batch` is the size of the global batch and must be a multiple of the {processes} "
            f"processes that share it, got {batch}. The nearest that work: {nearest}."
        )
    return slice(process * rows, (process + 1) * rows)


def check_batch(batch: Any) -> None:
    """Raises unless ``batch`` is a positive whole number."""
    if isinstance(batch, bool) or not isinstance(batch, int | np.integer) or batch < 1:
        raise ArgumentError(
            f"`batch` must be a whole number of examples, 1 or more, got {batch!r}. "
            "It counts the examples of all processes together."
        )


def check_step(step: Any) -> None:
    """Raises unless ``step`` is a whole number, zero or more."""
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
        raise ArgumentError(f"`step` must be a whole number, 0 or more, got {step!r}.")


def check_seed(seed: Any) -> None:
    """Raises unless ``seed`` is valid for both NumPy and Grain."""
    whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if not whole or not 0 <= seed < 2**32:
        raise ArgumentError(f"`seed` must be a whole number from 0 to 2**32 - 1, got {seed!r}.")


def count_examples(tree: PyTree, *, of: str) -> int:
    """The length of the first axis, which all leaves must share."""
    lengths: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path) or "the array"
        if np.ndim(leaf) == 0:
            raise ArgumentError(
                f"{of} must be arrays with examples along the first axis, but {name} is the "
                f"scalar {leaf!r}. Turn lists into arrays with np.asarray."
            )
        lengths[name] = np.shape(leaf)[0]
    if not lengths:
        raise ArgumentError(f"{of} must have at least one array, got {tree!r}.")
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise ArgumentError(f"{of} must share the length of their first axis, got {found}.")
    return next(iter(lengths.values()))


def check_maskable(tree: Any) -> None:
    """Raises unless a mask can be added to a batch."""
    if not isinstance(tree, dict):
        raise ArgumentTypeError(
            f"`once` adds the entry {MASK!r} to each batch, so examples must be dictionaries, got "
            f"{type(tree).__name__}. Name the parts, as in {{'x': x, 'y': y}}."
        )
    if MASK in tree:
        raise ArgumentError(
            f"`once` adds the entry {MASK!r} to each batch, but the examples have one already. "
            "Rename theirs."
        )


def add_mask(tree: Any, real: np.ndarray) -> dict[str, Any]:
    """A copy of a batch with a mask of its real rows."""
    check_maskable(tree)
    return {**tree, MASK: real.astype(np.float32)}


def check_integers(tree: PyTree, *, of: str) -> None:
    """Raises if JAX would cut off the leading bits of an integer.

    Without ``jax_enable_x64`` it keeps 32 of 64 bits, and 2⁴⁰ + 3 would silently become 3.

    Args:
        tree: a batch, or all examples; only NumPy's arrays are checked.
        of: what it is, for the message.

    Raises:
        ArgumentError: which array, and an integer in it that does not fit.
    """
    if jax.config.values["jax_enable_x64"]:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(leaf, np.ndarray) or leaf.dtype not in (np.int64, np.uint64):
            continue
        kept = np.iinfo(np.int32 if leaf.dtype == np.int64 else np.uint32)
        if leaf.size and not (kept.min <= leaf.min() and leaf.max() <= kept.max):
            worst = leaf.min() if leaf.min() < kept.min else leaf.max()
            raise ArgumentError(
                f"{of} must fit into {kept.dtype}, the integers that JAX computes with, but "
                f"{jax.tree_util.keystr(path) or 'the array'} is {leaf.dtype} and has {worst}, "
                "whose leading bits would be lost. Number what it stands for from 0, pass it as "
                "floating-point numbers, or call jax.config.update('jax_enable_x64', True) first."
            )
