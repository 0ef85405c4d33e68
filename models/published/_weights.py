"""Loading published weights into a model, and saving a model in a published layout."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

import jax.numpy as jnp
import numpy as np
from flax import nnx

from constrainx.errors import ArgumentError
from constrainx.models._windows import index_positions
from constrainx.models.published._names import Kind, Layout, Name, names_of
from constrainx.models.published._pickled import WeightsFileError, read_pickled

Model = TypeVar("Model", bound=nnx.Module)

# What other libraries keep beside the weights, and we compute.
_NOT_NEEDED = (
    "num_batches_tracked",
    "relative_position_index",
    "attn_mask",
    "relative_coords_table",
)
# Where some files keep their weights, beside an optimizer and an epoch.
_WRAPPERS = ("model.", "state_dict.", "module.", "model_ema.")
_NEWER_NAMES = {
    ".attention.q_proj.": ".attention.self.query.",
    ".attention.k_proj.": ".attention.self.key.",
    ".attention.v_proj.": ".attention.self.value.",
    ".attention.o_proj.": ".attention.output.dense.",
    ".attention.relative_position_bias.": ".attention.self.",
    ".mlp.fc1.": ".intermediate.dense.",
    ".mlp.fc2.": ".output.dense.",
}


def load_weights(
    model: Model,
    path: pathlib.Path | str,
    *,
    layout: Layout | None = None,
    new_head: bool = False,
) -> Model:
    """Loads published weights into a `ResNet` or `Swin`, in place, and returns the model.

    Every array of the model must be in the file in its shape, and every array of the file must have
    a place in the model; otherwise an error names those that do not, and the model stays as it is.

    Args:
        model: built with the sizes of the published one.
        path: a ``.safetensors`` file, or a ``.pth`` file, of which nothing but tensors is read.
        layout: whose names the file uses; found out by default.
        new_head: whether to leave the last layer as it is, to train it for other classes.

    Raises:
        WeightsFileError: the file cannot be read, or does not fit.
    """
    arrays = _unwrap(_read(pathlib.Path(path)))
    arrays = _rename({name: a for name, a in arrays.items() if not name.endswith(_NOT_NEEDED)})
    layout = _find_layout(model, arrays, path) if layout is None else layout
    names = names_of(model, layout)
    variables = _find_variables(model)
    wanted = [name for name in names if not (new_head and name.ours.startswith("head."))]
    used = {theirs for name in names for theirs in name.theirs}
    problems = [
        f"{theirs} is missing" for n in wanted for theirs in n.theirs if theirs not in arrays
    ]
    problems += [f"{theirs} has no place in the model" for theirs in arrays if theirs not in used]
    found = {}
    for name in wanted:
        if all(theirs in arrays for theirs in name.theirs):
            value = _from_theirs([arrays[theirs] for theirs in name.theirs], name.kind)
            if value.shape != variables[name.ours].shape:
                problems.append(
                    f"{name.theirs[0]} is {value.shape} for {name.ours} of "
                    f"{variables[name.ours].shape}"
                )
            found[name.ours] = value
    if problems:
        more = f", and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise WeightsFileError(
            f"{path} in the layout of {layout} does not fit this {type(model).__name__}: "
            f"{'; '.join(problems[:4])}{more}."
        )
    for ours, value in found.items():
        variables[ours].set_value(jnp.asarray(value, variables[ours].dtype))
    return model


def save_weights(model: nnx.Module, path: pathlib.Path | str, *, layout: Layout) -> None:
    """Saves a `ResNet` or `Swin` as a ``.safetensors`` file in a published layout.

    Args:
        model: the model, without masks: ``cx.masks.export(model)`` puts their zeros in the weights.
        path: the file to write; ends in ``.safetensors``.
        layout: whose names to use.
    """
    path = pathlib.Path(path)
    if path.suffix != ".safetensors":
        raise ArgumentError(f"`path` must end in .safetensors, got {path}.")
    from safetensors.numpy import save_file

    save_file(name_arrays(model, layout), path, metadata={"format": "pt"})


def name_arrays(model: nnx.Module, layout: Layout) -> dict[str, np.ndarray]:
    """All arrays of a `ResNet` or `Swin` under the names, and in the shapes, of a published layout.

    Args:
        model: the model, without masks: ``cx.masks.export(model)`` puts their zeros in the weights.
        layout: whose names to use.

    Raises:
        ArgumentError: the model has arrays that the layout has no place for, such as masks.
        ArgumentTypeError: the model is neither a `ResNet` nor a `Swin`.
    """
    variables = _find_variables(model)
    names = names_of(model, layout)
    nameless = sorted(variables.keys() - {name.ours for name in names})
    if nameless:
        raise ArgumentError(
            f"the layout of {layout} has no name for {', '.join(nameless[:3])}"
            f"{f' and {len(nameless) - 3} more' if len(nameless) > 3 else ''}. If these are masks, "
            "pass `cx.masks.export(model)`, whose weights have their zeros."
        )
    arrays: dict[str, np.ndarray] = {}
    for name in names:
        arrays |= _to_theirs(np.asarray(variables[name.ours][...]), name)
    if layout == "torchvision":
        # Theirs is a part of the state, and loading without it is an error.
        arrays |= {
            name.replace("_bias_table", "_index"): index_positions(_side_of(table)).flatten()
            for name, table in arrays.items()
            if name.endswith("relative_position_bias_table")
        }
    return arrays


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
    if path.suffix != ".safetensors":
        return read_pickled(path)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise WeightsFileError(f"{path} cannot be read as safetensors: {error}.") from error


def _unwrap(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Takes the weights out of a dictionary that also holds an optimizer and the like."""
    for wrapper in _WRAPPERS:
        inside = {
            name.removeprefix(wrapper): array
            for name, array in arrays.items()
            if name.startswith(wrapper)
        }
        if inside:
            return _unwrap(inside)
    return dict(arrays)


def _rename(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of a file under the names that `names_of` knows, where versions differ in them.

    In older timm files, and in Swin's own, a stage ends with its merging, and the head is a layer.
    Newer transformers hold a Swin under other names in memory than in published files.
    """
    ends_with_merging = any(name.startswith("layers.0.downsample.") for name in arrays)
    is_timm = "patch_embed.proj.weight" in arrays
    renamed = {}
    for name, array in arrays.items():
        if is_timm and ends_with_merging:
            name = re.sub(
                r"^layers\.(\d+)\.downsample",
                lambda found: f"layers.{int(found[1]) + 1}.downsample",
                name,
            )
        if is_timm:
            name = re.sub(r"^head\.(weight|bias)$", r"head.fc.\1", name)
        if name.startswith("swin."):
            for newer, published in _NEWER_NAMES.items():
                name = name.replace(newer, published)
        renamed[name] = array
    return renamed


def _find_layout(model: Any, arrays: Mapping[str, Any], path: Any) -> Layout:
    """The layout that most names of the file belong to."""
    found: dict[Layout, int] = {
        layout: sum(theirs in arrays for name in names_of(model, layout) for theirs in name.theirs)
        for layout in get_args(Layout)
    }
    best = max(found, key=lambda layout: found[layout])
    if not found[best]:
        raise WeightsFileError(
            f"{path} has none of the names that torchvision, timm or transformers give to the "
            f"arrays of a {type(model).__name__}; it begins with {list(arrays)[:3]}."
        )
    return best


def _find_variables(model: nnx.Module) -> dict[str, nnx.Variable]:
    flat = nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    return {
        ".".join(map(str, path)): variable
        for path, variable in zip(flat.paths, flat.leaves, strict=True)
    }


def _from_theirs(arrays: list[np.ndarray], kind: Kind) -> np.ndarray:
    array = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    if kind == "convolution":
        return array.transpose(2, 3, 1, 0)
    return array.T if kind == "matrix" else array


def _side_of(table: np.ndarray) -> int:
    """The side of the window that has this table of (2 side − 1)² relative positions."""
    return (math.isqrt(table.shape[0]) + 1) // 2


def _to_theirs(array: np.ndarray, name: Name) -> dict[str, np.ndarray]:
    if name.kind == "convolution":
        array = array.transpose(3, 2, 0, 1)
    elif name.kind == "matrix":
        array = array.T
    parts = np.split(array, len(name.theirs))
    return {
        theirs: np.ascontiguousarray(part) for theirs, part in zip(name.theirs, parts, strict=True)
    }
