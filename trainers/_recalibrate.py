"""`recalibrate`: the statistics of batch normalisation, measured again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PyTree

from constrainx.constraints import masks
from constrainx.data import Batches, arrays
from constrainx.errors import ArgumentError, ArgumentTypeError

# The mean and the variance of one layer.
Moments: TypeAlias = tuple[Float[Array, "..."], Float[Array, "..."]]

# Of a dictionary of arrays.
EXAMPLES_IN_A_BATCH = 256


def recalibrate(
    model: nnx.Module,
    data: Batches | dict[str, Any] | Iterable[PyTree],
    *,
    forward: Callable[[Any, Any], Any] | None = None,
    batches: int | None = None,
) -> int:
    """Measures the statistics of every `nnx.BatchNorm` again, in place.

    The means and variances that a layer keeps are moving averages along the path of training. They
    are out of date once weights have been pruned, averaged or projected. Here each becomes the
    average of the means and variances of single batches, weighted by their numbers of examples, so
    equally where batches are equal:

        μ = Σ_b n_b μ_b / Σ_b n_b,    σ² = Σ_b n_b σ_b² / Σ_b n_b.

    Each layer normalises by the batch while that is measured, as in training. Everything else is in
    evaluation mode: no dropout, and parameters stay as they are. If a layer is called several times
    in one forward pass, its last call counts.

    >>> import constrainx as cx, jax, numpy as np
    >>> from flax import nnx
    >>> model = nnx.Sequential(nnx.BatchNorm(1, rngs=nnx.Rngs(0)), jax.nn.relu)
    >>> cx.recalibrate(model, [{"x": np.array([[1.0], [3.0]])}, {"x": np.array([[5.0], [9.0]])}])
    1
    >>> print(model.layers[0].mean[...], model.layers[0].var[...])
    [4.5] [2.5]

    Args:
        model: any model, without masks: pass what `cx.masks.deterministic` or `cx.masks.export`
            returns. The first shares its statistics with the model that has the masks.
        data: what the statistics are of, mostly the training data: batches of `constrainx.data`,
            read from step 0 with their augmentation; a dictionary of arrays; or any iterable of
            batches.
        forward: (model, batch) ↦ what runs the layers; ``model(batch["x"])`` by default.
        batches: how many to use; by default all of an iterable, and else as many as one pass over
            the data fills.

    Returns:
        How many layers were recalibrated.

    Raises:
        ArgumentError: if there is no such layer, or the forward pass reaches none; if there is no
            data; or if a statistic is not finite. The model is then unchanged.
    """
    if masks.has_masks(model):
        raise ArgumentError(
            "`recalibrate(model, ...)` got a model with masks, whose statistics depend on which "
            "weights are kept: pass `cx.masks.deterministic(model)`, which shares them, or what "
            "`cx.masks.export(model)` returns."
        )
    layers = _find_layers(model)
    if not layers:
        raise ArgumentError(
            f"`recalibrate(model, ...)` needs a model with `nnx.BatchNorm`, and this "
            f"{type(model).__name__} has none."
        )
    measure = _compile(model, _call if forward is None else forward)
    sums: dict[str, list[np.ndarray]] = {}
    total = 0
    for number, batch in enumerate(_read(data, batches)):
        rows = len(jax.tree.leaves(batch)[0])
        for name, moments in jax.device_get(measure(nnx.state(model), batch)).items():
            if not all(np.isfinite(moment).all() for moment in moments):
                raise ArgumentError(
                    f"the statistics of {name} are not finite on batch {number}: the model's "
                    "weights or the data are not, or the activations overflow."
                )
            weighted = [rows * moment.astype(np.float64) for moment in moments]
            before = sums.get(name)
            sums[name] = weighted if before is None else [*map(np.add, before, weighted)]
        total += rows
    if total == 0:
        raise ArgumentError("`recalibrate(data=...)` needs at least one batch, got none.")
    if not sums:
        raise ArgumentError(
            f"the forward pass of this {type(model).__name__} measures none of its "
            f"{len(layers)} `nnx.BatchNorm`: it does not call them, or with "
            "`use_running_average=True`. Pass `forward=` with the part that does."
        )
    for name, (mean, variance) in sums.items():
        _set(layers[name].mean, mean / total)
        _set(layers[name].var, variance / total)
    return len(sums)


def _find_layers(model: nnx.Module) -> dict[str, nnx.BatchNorm]:
    return {
        ".".join(map(str, path)) or "the model": module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.BatchNorm)
    }


def _compile(
    model: nnx.Module, forward: Callable[[Any, Any], Any]
) -> Callable[[nnx.State, PyTree], dict[str, Moments]]:
    """A function of the model's state and a batch: the moments of each layer that is reached."""
    graph = nnx.graphdef(model)

    @jax.jit
    def measure(state: nnx.State, batch: PyTree) -> dict[str, Moments]:
        twin = nnx.merge(graph, state)
        twin.eval()
        layers = _find_layers(twin)
        before = {}
        for name, layer in layers.items():
            # The moving average then is the newest value, whatever was there before.
            layer.use_running_average, layer.momentum = False, 0.0
            for moment in (layer.mean, layer.var):
                moment.set_value(jnp.zeros_like(moment[...]))
            before[name] = layer.mean[...]
        forward(twin, batch)
        return {
            name: (layer.mean[...], layer.var[...])
            for name, layer in layers.items()
            if layer.mean[...] is not before[name]
        }

    return measure


def _call(model: Any, batch: Any) -> Any:
    if not isinstance(batch, dict) or "x" not in batch:
        found = sorted(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
        raise ArgumentTypeError(
            '`recalibrate` calls `model(batch["x"])`, but a batch is or has '
            f"{found}: pass `forward=lambda model, batch: ...`."
        )
    return model(batch["x"])


def _read(data: Any, batches: int | None) -> Iterator[PyTree]:
    if batches is not None and (
        isinstance(batches, bool) or not isinstance(batches, int) or batches < 1
    ):
        raise ArgumentError(f"`batches` must be a whole number, 1 or more, got {batches!r}.")
    if isinstance(data, dict):
        examples = len(next(iter(jax.tree.leaves(data)), ()))
        data = arrays(data, batch=max(min(examples, EXAMPLES_IN_A_BATCH), 1))
    if isinstance(data, Batches):
        if batches is None:
            if data.examples is None:
                raise ArgumentError("data without an end: say how many `batches=` to use.")
            batches = max(data.examples // data.batch, 1)
        iterator = data.from_step(0)
        try:
            yield from itertools.islice(iterator, batches)
        finally:
            if hasattr(iterator, "close"):  # it may own threads
                iterator.close()
    else:
        yield from itertools.islice(data, batches)


def _set(statistic: Any, value: np.ndarray) -> None:
    old = statistic[...]
    statistic.set_value(jax.device_put(value.astype(old.dtype), old.sharding))
