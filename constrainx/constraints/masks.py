"""Learnable Bernoulli masks on the weights of any NNX model.

Each masked weight w has a probability p of its own, and the network computes with

    w · m,    m ~ Bernoulli(p),    and for the gradient ∂m/∂p := 1

(the straight-through estimator), so that for a loss L of v = w·m the gradients are ∂L/∂w = m ∂L/∂v
and ∂L/∂p = w ∂L/∂v. The probabilities are parameters like any other, kept beside the weights.
They are stored as they are, not as logits, so that the density mean(p) is linear in the parameters;
an optimizer may carry them out of [0, 1], where they act as the nearest end of it, and the
straight-through gradient brings them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from constrainx.constraints._attach import ATTRIBUTE
from constrainx.errors import ArgumentError, ArgumentTypeError

Model = TypeVar("Model", bound=nnx.Module)


class MaskProbability(nnx.Param):
    """The probabilities with which the weights beside it are there; a parameter to be trained."""


class Masked(NamedTuple):
    """Weights and the probabilities of their mask."""

    weight: nnx.Param
    probability: MaskProbability


def kernels(path: tuple[Any, ...], variable: Any) -> bool:
    """An NNX filter: the kernels of dense, convolution and attention layers; no bias, no norm."""
    return bool(path) and path[-1] == "kernel" and variable.ndim >= 2


def add_masks(
    model: Model,
    where: Any = kernels,
    *,
    initial: float | Callable[[Array], Array] = 0.9,
) -> Model:
    """Gives weights of a model, in place, a learnable mask, and returns the model.

    The class of the model and of its layers stays as it is: a `MaskProbability` named
    ``kernel_mask`` appears beside each ``kernel``. The model itself still computes with all of its
    weights; `sample` and `deterministic` give the one that computes with some.

    >>> import jax
    >>> from constrainx import masks
    >>> from flax import nnx
    >>> model = masks.add_masks(nnx.Linear(20, 10, rngs=nnx.Rngs(0)), initial=0.25)
    >>> masks.sample(model, jax.random.key(0))(jax.numpy.ones(20)).shape
    (10,)
    >>> float(masks.realised_density(masks.export(model)))
    0.25

    Make the optimizer after this call, so that it knows the probabilities, and keep weight decay
    off them: ``optax.adamw(..., mask=...)`` or one `nnx.Optimizer` for each kind.

    Args:
        model: any module.
        where: an NNX filter on path and variable: the parameters to mask.
        initial: the probability to begin with, or a function from the weights to probabilities,
            such as ``lambda w: abs(w) > 0.01`` for fixed masks by magnitude.
    """
    matches = nnx.filterlib.to_predicate(where)
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    selected = [
        (path, variable)
        for path, variable in zip(flat.paths, flat.leaves, strict=True)
        if not isinstance(variable, MaskProbability) and matches(path, variable)
    ]
    if not selected:
        raise ArgumentError(
            f"`add_masks(where=...)` selects no parameter of this {type(model).__name__}, which "
            f"has {', '.join(map(_written, flat.paths[:8]))}, and {max(0, len(flat.paths) - 8)} "
            "more. Pass an NNX filter that selects some, such as "
            "`lambda path, variable: variable.ndim >= 2`."
        )
    already = {id(masked.weight) for masked in _all_masked(model)}
    added = []
    for path, weight in selected:
        if id(weight) in already:
            raise ArgumentError(f"`add_masks`: {_written(path)!r} has a mask already.")
        owner, inside = _owner(model, path)
        name = "_".join(map(str, inside)) + "_mask"
        if hasattr(owner, name):
            raise ArgumentError(
                f"`add_masks` keeps the mask of {_written(path)!r} as `{name}` beside it, but this "
                f"{type(owner).__name__} has an attribute of that name. Rename it."
            )
        probability = _initial_probability(weight, initial, path)
        variable = MaskProbability(probability, masks=inside, **_placement(weight))
        added.append((owner, name, variable))
    # Not before all are known to be right: an error leaves the model as it was.
    for owner, name, variable in added:
        setattr(owner, name, variable)
    return model


def sample(model: Model, key: Array) -> Model:
    """The model with weights w·m for a draw of the masks: call it inside the loss function.

    Same class, no masks. Everything but the masked weights is shared with ``model``, so that batch
    statistics and random streams advance there, too.

    Args:
        model: a model that went through `add_masks`.
        key: a new one each step; the same key gives the same draw.
    """
    masked = _some_masked(model)
    values = []
    for (weight, probability), draw in zip(masked, _draws(masked, key), strict=True):
        mask = straight_through(draw.astype(probability.dtype), probability[...])
        values.append(weight[...] * mask.astype(weight.dtype))
    return _with_weights(model, masked, values)


def deterministic(model: Model, density: float | None = None) -> Model:
    """The model with its most probable weights only, for evaluation during training.

    Keeps the round(density · N) of all N masked weights that have the highest probabilities, and
    sets the others to exactly zero. Among equal probabilities the larger weight stays, then the
    earlier one. Shares everything else with ``model``, as `sample` does. Sorts all probabilities:
    call it once for an evaluation, not for each batch.

    Args:
        model: a model that went through `add_masks`.
        density: the fraction to keep, over all masked weights together; by default the expected
            density.
    """
    masked = _some_masked(model)
    if density is not None and not 0 <= density <= 1:
        raise ArgumentError(f"`density` must lie between 0 and 1, got {density!r}.")
    count = _count(expected_density(model) if density is None else density, _size(masked))
    values = [
        # Not a product, which would turn a negative weight into −0 and keep a NaN.
        jnp.where(keep, weight[...], 0)
        for (weight, _), keep in zip(masked, _most_probable(masked, count), strict=True)
    ]
    return _with_weights(model, masked, values)


def export(model: Model, density: float | None = None) -> Model:
    """`deterministic` as a model of its own: no masks, nothing shared, pruned weights exactly zero.

    Constraints that may move nothing but masks, such as `MaskBudget`, are detached from it.

    Args:
        model: a model that went through `add_masks`.
        density: the fraction of all masked weights to keep; by default the expected density.
    """
    plain = nnx.clone(deterministic(model, density))
    for _, module in nnx.iter_modules(plain):
        constraints = getattr(module, ATTRIBUTE, ())
        if any(constraint.wrt is MaskProbability for constraint in constraints):
            kept = tuple(c for c in constraints if c.wrt is not MaskProbability)
            setattr(module, ATTRIBUTE, kept)
    return plain


def expected_density(model: nnx.Module) -> Float[Array, ""]:
    """Mean(p) over all masked weights: the fraction that a draw of the masks keeps on average."""
    masked = _some_masked(model)
    counts = [jnp.sum(_clipped(probability)) for _, probability in masked]
    return jnp.stack(counts).sum() / _size(masked)


def realised_density(
    model: nnx.Module, key: Array | None = None, *, where: Any = kernels
) -> Float[Array, ""]:
    """The fraction of weights that are there.

    Args:
        model: a model with masks, or one from `sample`, `deterministic` or `export`.
        key: for a model with masks: the draw, the same as that of ``sample(model, key)``.
        where: for a model without masks: an NNX filter, as in `add_masks`; its non-zeros count.
    """
    masked = _all_masked(model)
    if masked:
        if key is None:
            raise ArgumentError(
                "`realised_density` of a model with masks is that of a draw: pass a `key`, or "
                "`export(model)` for the deterministic one."
            )
        there = _draws(masked, key)
    else:
        leaves = nnx.to_flat_state(nnx.state(model, nnx.All(nnx.Param, where))).leaves
        if not leaves:
            raise ArgumentError(
                f"`realised_density(where=...)` selects no parameter of {type(model).__name__}."
            )
        there = [leaf[...] != 0 for leaf in leaves]
    return jnp.stack([jnp.sum(each) for each in there]).sum() / sum(each.size for each in there)


def probabilities(model: nnx.Module) -> list[Float[Array, ...]]:
    """The parameters behind the probabilities, which may lie outside of [0, 1]."""
    return [probability[...] for _, probability in _some_masked(model)]


def has_masks(model: nnx.Module) -> bool:
    """Whether the model, or a part of it, went through `add_masks`."""
    return bool(_all_masked(model))


@jax.custom_jvp
def straight_through(value: Array, surrogate: Array) -> Array:  # noqa: ARG001
    """``value``, exactly, with the derivative of ``surrogate``, in forward and in reverse mode."""
    return value


straight_through.defjvps(None, lambda tangent, _result, _value, _surrogate: tangent)


def _clipped(probability: MaskProbability) -> Array:
    return straight_through(jnp.clip(probability[...], 0, 1), probability[...])


def _draws(masked: Sequence[Masked], key: Array) -> list[Bool[Array, ...]]:
    """A mask for each, with a key of its own."""
    return [
        jax.random.bernoulli(jax.random.fold_in(key, i), jnp.clip(probability[...], 0, 1))
        for i, (_, probability) in enumerate(masked)
    ]


def _most_probable(masked: Sequence[Masked], count: int | Array) -> list[Bool[Array, ...]]:
    """The masks of the ``count`` most probable weights among all."""

    def descending(arrays: Sequence[Array]) -> Array:
        return -jnp.concatenate([array.reshape(-1) for array in arrays])

    position = jnp.arange(_size(masked))
    *_, order = jax.lax.sort(
        (
            descending([jnp.clip(probability[...], 0, 1) for _, probability in masked]),
            descending([jnp.abs(weight[...]) for weight, _ in masked]),
            position,
        ),
        num_keys=2,
        is_stable=True,
    )
    keep = jnp.zeros(position.shape, bool).at[order].set(position < count)
    ends = [0]
    for weight, _ in masked:
        ends.append(ends[-1] + weight.size)
    return [
        keep[start:end].reshape(weight.shape)
        for start, end, (weight, _) in zip(ends[:-1], ends[1:], masked, strict=True)
    ]


def _count(density: float | Array, size: int) -> int | Array:
    if isinstance(density, jax.core.Tracer):
        return jnp.round(density * size).astype(jnp.int32)
    # In double precision, since float32 cannot tell whole numbers apart above sixteen million.
    return round(float(density) * size)


def _with_weights(model: Model, masked: Sequence[Masked], values: Sequence[Array]) -> Model:
    """A model without masks that has these weights, and shares all other variables with `model`."""
    new = {
        # By identity, so that weights that several layers share stay shared.
        id(weight): weight.replace(value)
        for (weight, _), value in zip(masked, values, strict=True)
    }
    graph, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    leaves = [new.get(id(leaf), leaf) for leaf in flat.leaves]
    result = nnx.merge(graph, nnx.from_flat_state(zip(flat.paths, leaves, strict=True)))
    nnx.pop(result, MaskProbability)
    return result


def _all_masked(model: nnx.Module) -> list[Masked]:
    """Masks and their weights in a fixed order."""
    found = {
        (*map(str, path), name): Masked(_inside(module, value.get_metadata("masks")), value)
        for path, module in nnx.iter_modules(model)
        for name, value in vars(module).items()
        if isinstance(value, MaskProbability)
    }
    return [found[path] for path in sorted(found)]


def _some_masked(model: nnx.Module) -> list[Masked]:
    masked = _all_masked(model)
    if not masked:
        raise ArgumentError(
            f"this {type(model).__name__} has no masks: call `cx.masks.add_masks(model)` first."
        )
    return masked


def _size(masked: Sequence[Masked]) -> int:
    return sum(weight.size for weight, _ in masked)


def _initial_probability(
    weight: nnx.Param, initial: float | Callable[[Array], Array], path: tuple[Any, ...]
) -> Array:
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ArgumentTypeError(
            f"`add_masks` masks floating-point weights, but {_written(path)!r} is {weight.dtype}. "
            "Leave it out of `where`."
        )
    # Steps of 1e-3 and less are lost in a half-precision probability near one.
    dtype = jnp.promote_types(weight.dtype, jnp.float32)
    if not callable(initial):
        if not 0 <= initial <= 1:
            raise ArgumentError(f"`add_masks(initial=...)` must lie in [0, 1], got {initial!r}.")
        return jnp.full_like(weight[...], initial, dtype=dtype)
    probability = jnp.asarray(initial(weight[...]), dtype)
    if probability.shape != weight.shape:
        raise ArgumentError(
            f"`add_masks(initial=...)` must give a probability for each weight: for "
            f"{_written(path)!r} of shape {weight.shape} it gave shape {probability.shape}."
        )
    return probability


def _placement(weight: nnx.Param) -> Mapping[str, Any]:
    """The metadata that says where on a mesh an array lives: a mask lives where its weights do."""
    names = ("out_sharding", "sharding_rules", "mesh", "optimizer_sharding")
    metadata = weight.get_metadata()
    return {name: metadata[name] for name in names if name in metadata}


def _owner(model: nnx.Module, path: tuple[Any, ...]) -> tuple[nnx.Module, tuple[Any, ...]]:
    """The module that a parameter belongs to, and the rest of the path inside it."""
    owner, depth, node = model, 0, model
    for index, step in enumerate(path[:-1]):
        node = _inside(node, (step,))
        # A list of parameters cannot hold more than these.
        if isinstance(node, nnx.Module) and not isinstance(node, nnx.List):
            owner, depth = node, index + 1
    return owner, path[depth:]


def _inside(node: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        has_items = isinstance(node, nnx.List | list | tuple | dict)
        node = node[step] if has_items else getattr(node, step)
    return node


def _written(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
