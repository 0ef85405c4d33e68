"""Metrics and violations on held-out data, where every example counts exactly once."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from constrainx.constraints import Composed
from constrainx.data import Batches
from constrainx.errors import ArgumentError, ArgumentTypeError
from constrainx.runtime import Sharding, relative_metric, violation_metric
from constrainx.trainers._batches import GiveUp, read_ahead, wait_for

Metric = Callable[[Any, Any], Float[Array, "examples ..."]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Measure:
    """What is measured, as a compiled function of one batch.

    Attributes:
        rebuild: (parameters, rest) ↦ model.
        metrics: (model, batch) ↦ a figure for each example, by name.
        constraints: whose violations are measured.
        sharding: where batches go.
        seed: for constraints that draw samples; the same draws in every evaluation.
    """

    rebuild: Callable[[nnx.State, nnx.State], Any]
    metrics: Mapping[str, Metric]
    constraints: Composed | None
    sharding: Sharding
    seed: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "_measure", jax.jit(self._measure_batch))

    @property
    def names(self) -> tuple[str, ...]:
        """What is measured."""
        members = self.constraints or ()
        relative = (relative_metric(member.name) for member in members if member.has_scale)
        return (*self.metrics, *(violation_metric(member.name) for member in members), *relative)

    def __call__(
        self,
        parameters: nnx.State,
        rest: nnx.State,
        data: Batches,
        *,
        limit: int | None = None,
        give_up: GiveUp = lambda _: False,
    ) -> dict[str, float] | None:
        """Means over the examples; None if it has given up.

        A violation is a figure of a whole batch, so an incomplete last batch counts only for the
        metrics. A relative violation is the mean violation over the mean scale.

        Args:
            parameters: of the model.
            rest: the rest of its state.
            data: to measure on.
            limit: the largest number of batches to use.
            give_up: seconds waited for the next batch ↦ whether to stop waiting.
        """
        batch = self._batch_size(data)
        rows = data.once(batch=batch, process=jax.process_index(), processes=jax.process_count())
        full = None if data.examples is None else data.examples // batch
        sums: list[tuple[dict, dict, dict, bool]] = []
        ahead = read_ahead(rows, is_cheap=data.is_cheap)
        with contextlib.ExitStack() as stack:
            if hasattr(ahead, "close"):
                stack.callback(ahead.close)
            for number in itertools.count() if limit is None else range(limit):
                if not wait_for(ahead, give_up):
                    return None
                local = next(ahead, None)
                if local is None:
                    break
                placed = self.sharding.place_batch(local)
                measured = self._measure(parameters, rest, placed, number)  # type: ignore[attr-defined]
                sums.append((*measured, full is None or number < full))
        return _means(jax.device_get(sums))

    def _batch_size(self, data: Batches) -> int:
        """That of the data, as a multiple of the devices, and at most the number of examples."""
        devices = self.sharding.mesh.size
        wanted = data.batch if data.examples is None else min(data.batch, data.examples)
        # Rounding up could make a batch larger than the data, and it would never be full.
        return max(wanted // devices, 1) * devices

    def _measure_batch(
        self, parameters: nnx.State, rest: nnx.State, batch: dict[str, Any], number: Array
    ) -> tuple[dict[str, Any], dict[str, Array], dict[str, tuple[Array, Array]]]:
        model = self.rebuild(parameters, rest)
        model.eval()
        mask = batch["mask"]
        examples = {name: leaf for name, leaf in batch.items() if name != "mask"}
        sums: dict[str, Any] = {"": jnp.sum(mask)}
        for name, metric in self.metrics.items():
            values = _per_example(name, metric(model, examples), mask.shape[0])
            # Padding may hold anything, including NaN.
            sums[name] = jnp.sum(jnp.where(mask > 0, values, 0))
        key = jax.random.fold_in(jax.random.key(self.seed), number)
        violations, relative = {}, {}
        for index, member in enumerate(self.constraints or ()):
            own = jax.random.fold_in(key, index)
            violation = member.measure(model, examples, own)
            violations[violation_metric(member.name)] = violation
            scale = member.measure_scale(model, examples, own) if member.has_scale else None
            if scale is not None:
                relative[relative_metric(member.name)] = (violation, scale)
        return sums, violations, relative


def _per_example(name: str, values: PyTree, examples: int) -> Float[Array, " examples"]:
    shape = jnp.shape(values)
    if not shape or shape[0] != examples:
        raise ArgumentError(
            f"the metric {name!r} must return a figure for each of the {examples} examples of a "
            f"batch, so that the last batch can be filled up, got shape {shape}. Leave out the "
            "mean: `lambda model, batch: (model(batch['x']) - batch['y']) ** 2`."
        )
    if jnp.issubdtype(jnp.result_type(values), jnp.complexfloating):
        raise ArgumentTypeError(
            f"the metric {name!r} must return real figures, got {jnp.result_type(values)}: take "
            "their absolute values."
        )
    return jnp.mean(jnp.asarray(values, jnp.float32).reshape(examples, -1), axis=1)


def _means(parts: Sequence[tuple[dict, dict, dict, bool]]) -> dict[str, float]:
    if not parts:
        raise ArgumentError("`evaluation` has no examples.")
    total = sum(float(sums[""]) for sums, *_ in parts)
    figures = {
        name: sum(float(sums[name]) for sums, *_ in parts) / total for name in parts[0][0] if name
    }
    whole = [(violations, relative) for _, violations, relative, is_full in parts if is_full]
    for name in parts[0][1]:
        figures[name] = _mean([float(violations[name]) for violations, _ in whole])
    for name in parts[0][2]:
        pairs = [relative[name] for _, relative in whole]
        figures[name] = _divide(*(_mean([float(pair[i]) for pair in pairs]) for i in range(2)))
    return figures


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _divide(violation: float, scale: float) -> float:
    if scale > 0 or math.isnan(scale):
        return violation / scale
    return math.inf if violation > 0 else 0.0
