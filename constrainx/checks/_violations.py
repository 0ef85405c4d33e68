"""The violation of a constraint for each of many held-out points, and what counts as a point."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from constrainx.constraints import (
    Attached,
    Constraint,
    Member,
    at_path,
    find_live_inputs,
    reseed_streams,
)
from constrainx.constraints.reductions import root_mean_square
from constrainx.data import Batches
from constrainx.errors import ArgumentError
from constrainx.runtime import Sharding

# What a measurement of one point returns: the violation, and its scale if it has one.
Measured: TypeAlias = tuple[Array, Array | None]
# How many draws are measured at a time.
TOGETHER = 16


class Unit(enum.StrEnum):
    """What one violation is measured on.

    - PARAMETERS: the model as a whole, for a constraint that depends on neither batch nor key. The
      figure is exact.
    - EXAMPLE: one example, for a residual with examples along its first axis.
    - BATCH: a batch, for a residual that is a figure of all examples, or ``reduce="mean"``.
    - DRAW: one random draw, for a constraint that depends on the key but not on the batch.
    """

    PARAMETERS = "parameters"
    EXAMPLE = "example"
    BATCH = "batch"
    DRAW = "draw"


class Violations(NamedTuple):
    """The violations of one constraint at held-out points.

    Attributes:
        unit: what a point is.
        values: a violation for each.
        scales: what they are compared with; None if the constraint has no scale.
        left_out: how many examples did not fill a last batch, where points are batches.
    """

    unit: Unit
    values: Float[np.ndarray, " points"]
    scales: Float[np.ndarray, " points"] | None
    left_out: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """Where violations are measured.

    Attributes:
        model: in evaluation mode.
        data: held-out examples.
        sharding: how they are split over devices.
        batch: how many examples are measured at a time, and in a point that is a batch.
        draws: how many draws, for constraints that look at no example.
        key: all randomness comes from it. A point's own key depends on its position alone.
    """

    model: nnx.Module
    data: Batches
    sharding: Sharding
    batch: int
    draws: int
    key: Array

    def measure(self, member: Member, index: int) -> Violations:
        """Measures one constraint, the one with this index among several."""
        path, constraint = _get_attached(member)
        rebuild, state = self._take_apart()
        key = jax.random.fold_in(self.key, index)

        def measure_one(state: PyTree, batch: Any, key: Array) -> Measured:
            return _measure(constraint, at_path(rebuild(state, key), path), batch, key)

        batches: Iterator[dict[str, Any]] = iter(self._read_batches())
        first = next(batches, None)
        if first is None:
            raise ArgumentError("`certify(data=...)` has no examples.")
        examples = _drop_mask(first)

        def find_shapes(batch: Any) -> PyTree:
            module = at_path(rebuild(state, key), path)
            return constraint.residual(module, batch, key=key)

        unit = _find_unit(constraint, measure_one, find_shapes, state, examples, key)
        if unit is Unit.PARAMETERS:
            found = jax.jit(measure_one, out_shardings=self.sharding.whole)(state, examples, key)
            return _collect(unit, [(found, np.ones(1))])
        if unit is Unit.DRAW:
            keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(self.draws))
            found = jax.jit(
                lambda s, k: jax.lax.map(
                    lambda one: measure_one(s, examples, one), k, batch_size=TOGETHER
                ),
                out_shardings=self.sharding.whole,
            )(state, keys)
            return _collect(unit, [(found, np.ones(self.draws))])
        batches = itertools.chain([first], batches)
        return self._measure_data(unit, measure_one, state, key, batches)

    def _measure_data(
        self,
        unit: Unit,
        measure_one: Callable[[PyTree, Any, Array], Measured],
        state: PyTree,
        key: Array,
        batches: Iterable[dict[str, Any]],
    ) -> Violations:
        def measure_examples(state: PyTree, batch: Any, start: Int[Array, ""]) -> Any:
            mask = batch["mask"]
            examples = _drop_mask(batch)
            keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(start + jnp.arange(mask.shape[0]))

            def one(example: Any, key: Array) -> Measured:
                return measure_one(state, jax.tree.map(lambda leaf: leaf[None], example), key)

            return jax.vmap(one)(examples, keys), mask

        def measure_batch(state: PyTree, batch: Any, start: Int[Array, ""]) -> Any:
            found = measure_one(state, _drop_mask(batch), jax.random.fold_in(key, start))
            # A batch that was padded does not count.
            full = jnp.min(batch["mask"])[None]
            return jax.tree.map(lambda leaf: leaf[None], found), full, jnp.sum(batch["mask"])

        if unit is Unit.EXAMPLE:
            compiled = jax.jit(measure_examples, out_shardings=self.sharding.whole)
        else:
            compiled = jax.jit(measure_batch, out_shardings=self.sharding.whole)
        parts, left_out = [], 0
        for number, local in enumerate(batches):
            placed = self.sharding.place_batch(local)
            found, mask, *rows = jax.device_get(compiled(state, placed, number * self.batch))
            parts.append((found, mask))
            left_out += int(rows[0]) if rows and not mask[0] else 0
        return _collect(unit, parts)._replace(left_out=left_out)

    def _read_batches(self) -> Iterator[dict[str, Any]]:
        place = {"process": jax.process_index(), "processes": jax.process_count()}
        return self.data.once(batch=self.batch, **place)

    def _take_apart(self) -> tuple[Callable[[PyTree, Array], Any], PyTree]:
        """The model as a function of its state and a key for its random streams, and that state."""
        parts: Any = nnx.split(self.model, nnx.RngState, ...)
        graph, rngs, state = parts

        def rebuild(state: PyTree, key: Array) -> Any:
            seeded = reseed_streams(rngs, jax.random.fold_in(key, 2))
            model = nnx.merge(graph, seeded, state)
            model.eval()
            return model

        return rebuild, state


def _get_attached(member: Member) -> Attached:
    if member.attached is None:
        raise ArgumentError(
            f"`certify` needs constraints that know their violation, and {member.name!r} is a "
            "plain function: write it as a subclass of `cx.Constraint`."
        )
    return member.attached


def _measure(constraint: Constraint, module: Any, batch: Any, key: Array) -> Measured:
    scale = constraint.scale(module, batch, key)
    if not _holds_on_average(constraint):
        return constraint.violation(module, batch, key), scale
    residual_key, reduction_key = jax.random.split(key)
    residual = constraint.residual(module, batch, key=residual_key)
    rows = constraint.reduction(residual, key=reduction_key)
    if constraint.kind == "inequality":
        rows = jnp.maximum(rows, 0)
    return root_mean_square(rows), scale


def _holds_on_average(constraint: Constraint) -> bool:
    """Whether only the mean over the batch must be zero, not each example."""
    return constraint.reduce == "mean" and type(constraint).violation is Constraint.violation


def _find_unit(
    constraint: Constraint,
    measure_one: Callable[[PyTree, Any, Array], Measured],
    find_shapes: Callable[[Any], PyTree],
    state: PyTree,
    batch: Any,
    key: Array,
) -> Unit:
    closed = jax.make_jaxpr(lambda b, k: measure_one(state, b, k)[0])(batch, key)
    *of_batch, of_key = find_live_inputs(closed)
    if not any(of_batch):
        return Unit.DRAW if of_key else Unit.PARAMETERS
    if _holds_on_average(constraint) or not _has_examples_first(find_shapes, batch):
        return Unit.BATCH
    return Unit.EXAMPLE


def _has_examples_first(find_residual: Callable[[Any], PyTree], batch: Any) -> bool:
    """Whether the residual has as many entries along its first axis as the batch has examples."""
    for count in (2, 3):
        shapes = jax.tree.map(
            lambda leaf, n=count: jax.ShapeDtypeStruct((n, *leaf.shape[1:]), leaf.dtype), batch
        )
        try:
            residual = jax.eval_shape(find_residual, shapes)
        except Exception:  # the measurement itself then raises the error
            return False
        if any(leaf.shape[:1] != (count,) for leaf in jax.tree.leaves(residual)):
            return False
    return True


def _drop_mask(batch: dict[str, Any]) -> Any:
    return {name: leaf for name, leaf in batch.items() if name != "mask"}


def _collect(unit: Unit, parts: list[tuple[Measured, Any]]) -> Violations:
    """The violations of real points, without those of padding."""
    real = np.concatenate([np.asarray(mask).reshape(-1) for _, mask in parts]) > 0

    def join(leaves: list[Any]) -> np.ndarray:
        joined = np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in leaves])
        return joined[real]

    values = join([found[0] for found, _ in parts])
    has_scale = parts[0][0][1] is not None
    return Violations(unit, values, join([found[1] for found, _ in parts]) if has_scale else None)
