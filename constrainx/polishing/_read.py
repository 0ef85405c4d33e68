"""Reads the points that constraints are to hold at, and puts them on the devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from constrainx.data import Batches, check_integers
from constrainx.errors import ArgumentError, ArgumentTypeError
from constrainx.polishing._points import Points

# Examples of a dictionary of arrays that are looked at together.
TOGETHER = 256


def read_points(
    data: Any,
    *,
    argument: str,
    model: nnx.Module,
    key: Array,
    draws: int = 1,
    batch: int | None = None,
    batches: int | None = None,
    augment: Callable[[Any, Array], Any] | None = None,
) -> Points:
    """All points of some data.

    Args:
        data: batches, which are read from step 0; a dictionary of arrays, in order and to the last
            example; or None, for constraints that look at no example.
        argument: what the data is called, for errors.
        model: whose devices the points go to.
        key: for constraints that draw, and for ``augment``.
        draws: how often a constraint that draws looks at each batch.
        batch: how many examples of a dictionary are looked at together.
        batches: how many batches to read; one pass if left out.
        augment: (batch, key) ↦ batch, applied to each batch once.
    """
    if data is None:
        found: list[PyTree] = [{}]
    elif isinstance(data, Batches):
        found = list(_take_batches(data, argument, batches))
    elif isinstance(data, dict) and jax.tree.leaves(data):
        found = list(_cut(data, argument, batch or TOGETHER))
    else:
        raise ArgumentTypeError(
            f"`{argument}` must be batches from `constrainx.data` or a dictionary of arrays, such "
            f"as {{'x': x}}, got {type(data).__name__}."
        )
    for rows in found:
        check_integers(rows, of=f"`{argument}`")
    mesh = find_mesh(model)
    stacks, counts, examples = [], [], []
    for size, group in itertools.groupby(found, _count):
        rows = list(group)
        stack = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
        stacks.append(_place(stack, mesh))
        counts.append(len(rows))
        examples.append(size)
    if augment is not None:
        stacks = list(_augment(stacks, counts, augment, jax.random.fold_in(key, 2**31 - 1)))
    return Points(tuple(stacks), key, tuple(counts), tuple(examples), draws)


def read_held_out(data: Any, *, model: nnx.Module, key: Array, **options: Any) -> Points:
    """All held-out points: batches are read once, without what is random in them."""
    if isinstance(data, Batches):
        passed: Any = data.once(**_share(data.batch))
        if jax.process_count() > 1:  # where processes would differ in the rest
            passed = itertools.islice(passed, (data.examples or 0) // data.batch)
        rows = [_drop_padding(found) for found in passed]
        options = {"batch": data.batch // jax.process_count(), **options}
        if not rows:
            raise ArgumentError("`held_out` has no examples, or no full batch of them.")
        data = jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)
    return read_points(data, argument="held_out", model=model, key=key, **options)


def find_mesh(model: nnx.Module) -> Mesh | None:
    """The mesh that a model's arrays are placed on; None if there is one device."""
    for leaf in jax.tree.leaves(nnx.state(model)):
        match getattr(leaf, "sharding", None):
            case NamedSharding(mesh=Mesh() as mesh) if mesh.size > 1:
                return mesh
    return None


def _share(batch: int) -> dict[str, int]:
    return {"batch": batch, "process": jax.process_index(), "processes": jax.process_count()}


def _take_batches(data: Batches, argument: str, batches: int | None) -> Iterator[PyTree]:
    if batches is None:
        if data.examples is None:
            raise ArgumentError(
                f"`{argument}` has no end: say how many batches to take, `batches=...`."
            )
        batches = max(data.examples // data.batch, 1)
    iterator: Any = data.from_step(0, process=jax.process_index(), processes=jax.process_count())
    try:
        yield from itertools.islice(iterator, batches)
    finally:
        if hasattr(iterator, "close"):  # it may own threads
            iterator.close()


def _cut(data: dict[str, Any], argument: str, size: int) -> Iterator[PyTree]:
    data = jax.tree.map(np.asarray, data)
    lengths = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(data)}
    if len(lengths) != 1 or 0 in lengths:
        shapes = jax.tree.map(np.shape, data)
        raise ArgumentError(
            f"the arrays of `{argument}` must share their first axis, the examples, and have at "
            f"least one; got {shapes}."
        )
    for start in range(0, lengths.pop(), size):
        yield jax.tree.map(lambda leaf, start=start: leaf[start : start + size], data)


def _count(rows: PyTree) -> int:
    leaves = jax.tree.leaves(rows)
    return np.shape(leaves[0])[0] * jax.process_count() if leaves else 1


def _place(stack: PyTree, mesh: Mesh | None) -> PyTree:
    """Examples split over all devices where their number allows it, else a copy for each."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, stack)

    def put(leaf: np.ndarray) -> Array:
        rows = leaf.shape[1] * jax.process_count() if leaf.ndim > 1 else 1
        is_split = rows % mesh.size == 0
        if not is_split and jax.process_count() > 1:
            raise ArgumentError(
                f"{rows} examples cannot be split over {mesh.size} devices of several processes: "
                "take a multiple."
            )
        spec = PartitionSpec(None, mesh.axis_names) if is_split else PartitionSpec()
        return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), leaf)

    return jax.tree.map(put, stack)


def _augment(
    stacks: Sequence[PyTree],
    counts: Sequence[int],
    augment: Callable[[Any, Array], Any],
    key: Array,
) -> Iterator[PyTree]:
    change = jax.jit(lambda stack, keys: jax.lax.map(lambda pair: augment(*pair), (stack, keys)))
    for number, (stack, count) in enumerate(zip(stacks, counts, strict=True)):
        yield change(stack, jax.random.split(jax.random.fold_in(key, number), count))


def _drop_padding(rows: dict[str, Any]) -> dict[str, Any]:
    real = np.asarray(rows["mask"]) > 0
    return {
        name: jax.tree.map(lambda leaf: np.asarray(leaf)[real], leaf)
        for name, leaf in rows.items()
        if name != "mask"
    }
