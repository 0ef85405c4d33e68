"""The model of a run, back in one line."""

from __future__ import annotations

import pathlib
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError

from constrainx.recipes._continue import read_recipe
from constrainx.recipes._polished import WEIGHTS
from constrainx.runtime import CheckpointError, StoredCheckpoints, by_path, has_checkpoints

Model = TypeVar("Model", bound=nnx.Module)


def load(
    run: pathlib.Path | str,
    model: Model | None = None,
    *,
    step: int | Literal["last", "best"] = "last",
    average: bool = True,
    polished: bool = False,
    recipe: pathlib.Path | str | None = None,
) -> Any:
    """The model of a run, in evaluation mode, without its optimizer.

    The weights are compared with the digests that were saved with them. ``model = cx.load(run)``
    builds the model by the run's recipe; ``cx.load(run, model)`` needs no recipe.

    Args:
        run: the folder of the run.
        model: a model of the same structure, whose weights are replaced; built by the run's recipe
            if left out.
        step: which checkpoint.
        average: whether to take the moving average of the parameters, if there is one.
        polished: whether to take what ``constrainx polish`` has written, instead of a checkpoint.
        recipe: the file of the run's recipe, if it is your own: its code is executed.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or of another model.
    """
    folder = pathlib.Path(run)
    if not has_checkpoints(folder / "checkpoints"):
        raise CheckpointError(f"{folder} has no complete checkpoint.")
    found: Any = model
    if found is None:
        found = _build(folder, recipe)
    if polished:
        _fill(found, _read_polished(folder), average=False, folder=folder)
        found.eval()
        return found
    stored = StoredCheckpoints(folder / "checkpoints")
    try:
        arrays = stored.read_arrays(stored.find(step), ("parameters.", "rest.", "ema."))
    finally:
        stored.close()
    _fill(found, arrays, average=average, folder=folder)
    found.eval()
    return found


def _read_polished(folder: pathlib.Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    path = folder / WEIGHTS
    if not path.exists():
        raise CheckpointError(f"there is no {path}: write it by `constrainx polish {folder}`.")
    try:
        return {f"parameters.{name}": array for name, array in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error


def _build(folder: pathlib.Path, recipe: pathlib.Path | str | None) -> nnx.Module:
    """The model of a run's recipe, with fresh weights."""
    chosen = read_recipe(folder, file=recipe)
    if jax.process_count() == 1:
        # Nothing is trained, so the batch need not be a multiple of the devices that are here.
        chosen = chosen.but(devices=1, fsdp=1)
    return chosen.trainer(progress=False).model


def _fill(
    model: nnx.Module, arrays: dict[str, np.ndarray], *, average: bool, folder: pathlib.Path
) -> None:
    """Replaces all weights and statistics of a model, or raises and replaces none."""
    parts: dict[str, dict[str, np.ndarray]] = {"parameters": {}, "rest": {}, "ema": {}}
    for path, array in arrays.items():
        part, _, name = path.partition(".")
        parts[part][name] = array
    stored = {**parts["rest"], **parts["parameters"], **(parts["ema"] if average else {})}
    state = nnx.state(model, nnx.Not(nnx.RngState))
    wanted = by_path(nnx.as_pure(state))
    faults = [
        *(f"{name} is missing there" for name in wanted if name not in stored),
        *(f"{name} is there and not here" for name in stored if name not in wanted),
        *(
            f"{name} is {stored[name].dtype}{list(stored[name].shape)} there and "
            f"{leaf.dtype}{list(leaf.shape)} here"
            for name, leaf in wanted.items()
            if name in stored
            and (stored[name].shape, stored[name].dtype) != (leaf.shape, leaf.dtype)
        ),
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(
            f"`load(model=...)` is not the model of {folder}: {'; '.join(faults[:3])}{more}."
        )
    flat = nnx.to_flat_state(state)
    for keys, variable in zip(flat.paths, flat.leaves, strict=True):
        variable.set_value(jnp.asarray(stored[".".join(map(str, keys))]))
    nnx.update(model, state)
