"""Adding masks to a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from constrainx.constraints.masks._paths import Path, format_path, split_at_owner
from constrainx.constraints.masks._pattern import parse_pattern
from constrainx.constraints.masks._probability import MaskProbability, find_masked
from constrainx.errors import ArgumentError, ArgumentTypeError

log = logging.getLogger("constrainx")

Model = TypeVar("Model", bound=nnx.Module)


def kernels(path: Path, variable: Any) -> bool:
    """Selects the kernels of dense, convolution and attention layers: an NNX filter."""
    return bool(path) and path[-1] == "kernel" and variable.ndim >= 2


def add_masks(
    model: Model,
    where: Any = kernels,
    *,
    initial: float | Callable[[Array], Array] = 0.9,
    pattern: str | None = None,
) -> Model:
    """Adds learnable masks to the weights of a model, in place, and returns the model.

    The class of the model and of its layers stays as it is: a `MaskProbability` named
    ``kernel_mask`` appears beside each ``kernel``. The model itself still computes with all of its
    weights; `sample` and `deterministic` return one that computes with some of them.

    >>> import jax
    >>> from constrainx import masks
    >>> from flax import nnx
    >>> model = masks.add_masks(nnx.Linear(20, 10, rngs=nnx.Rngs(0)), initial=0.25)
    >>> masks.sample(model, jax.random.key(0))(jax.numpy.ones(20)).shape
    (10,)
    >>> float(masks.realised_density(masks.export(model)))
    0.25

    Make the optimizer after this call, so that it knows the probabilities, and keep weight decay
    off them: ``optax.adamw(..., mask=...)`` or one `nnx.Optimizer` for each kind. Matrices that are
    not selected, such as embedding tables and LoRA factors by default, are named in the log.

    Args:
        model: any module.
        where: an NNX filter on path and variable: the parameters to mask.
        initial: the probability to begin with, or a function from the weights to probabilities,
            such as ``lambda w: abs(w) > 0.01`` for fixed masks by magnitude.
        pattern: such as "2:4" to keep two of each four weights that follow each other along the
            input axis, the last but one, as the sparse matrix units of GPUs want them. Weights
            whose input axis cannot be cut so are left out.
    """
    groups = None if pattern is None else parse_pattern(pattern, argument="add_masks(pattern=...)")
    matches = nnx.filterlib.to_predicate(where)
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    selected = [
        (path, variable)
        for path, variable in zip(flat.paths, flat.leaves, strict=True)
        if not isinstance(variable, MaskProbability)
        and matches(path, variable)
        and (groups is None or groups.fits(variable.shape))
    ]
    if not selected:
        raise ArgumentError(
            f"`add_masks(where=...)` selects no parameter of this {type(model).__name__}"
            f"{'' if groups is None else ' whose input axis can be cut in groups'}, which "
            f"has {_list_paths(flat.paths)}. Pass an NNX filter that selects some, such as "
            "`lambda path, variable: variable.ndim >= 2`."
        )
    already = {id(masked.weight) for masked in find_masked(model)}
    added = []
    for path, weight in selected:
        if id(weight) in already:
            raise ArgumentError(
                f"`add_masks`: {format_path(path)!r} has a mask already. Leave it out of `where`."
            )
        owner, inside = split_at_owner(model, path)
        name = "_".join(map(str, inside)) + "_mask"
        if hasattr(owner, name):
            raise ArgumentError(
                f"`add_masks` stores the mask of {format_path(path)!r} as `{name}` beside it, but "
                f"this {type(owner).__name__} already has an attribute of that name. Rename it."
            )
        probability = _make_probability(weight, initial, path)
        kept: dict[str, Any] = {} if pattern is None else {"keep": pattern}
        variable = MaskProbability(probability, masks=inside, **kept, **_copy_placement(weight))
        added.append((owner, name, variable))
    # Not before all are known to be right: an error leaves the model as it was.
    for owner, name, variable in added:
        setattr(owner, name, variable)
    _log_left_out(model)
    return model


def _list_paths(paths: Sequence[Path], most: int = 8) -> str:
    listed = ", ".join(map(format_path, paths[:most])) or "none"
    return f"{listed}, and {len(paths) - most} more" if len(paths) > most else listed


def _log_left_out(model: nnx.Module) -> None:
    """Says which matrices have no mask: embeddings and low-rank factors are easily forgotten."""
    masked = {id(weight) for weight, _ in find_masked(model)}
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    left_out = [
        format_path(path)
        for path, variable in zip(flat.paths, flat.leaves, strict=True)
        if variable.ndim >= 2
        and not isinstance(variable, MaskProbability)
        and id(variable) not in masked
    ]
    if left_out:
        log.info(
            "add_masks left out %s: to mask these, too, select them with `where`",
            ", ".join(left_out),
        )


def _make_probability(
    weight: nnx.Param, initial: float | Callable[[Array], Array], path: Path
) -> Array:
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise ArgumentTypeError(
            f"`add_masks` masks floating-point weights, but {format_path(path)!r} is "
            f"{weight.dtype}. Leave it out of `where`."
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
            f"{format_path(path)!r} of shape {weight.shape} it gave shape {probability.shape}."
        )
    return probability


def _copy_placement(weight: nnx.Param) -> Mapping[str, Any]:
    """Copies the metadata that places an array on a mesh: a mask is sharded like its weights."""
    names = ("out_sharding", "sharding_rules", "mesh", "optimizer_sharding", "eager_sharding")
    metadata = weight.get_metadata()
    return {name: metadata[name] for name in names if name in metadata}
