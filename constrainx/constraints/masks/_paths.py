"""Paths of parameters inside a model."""

from __future__ import annotations

from typing import Any, TypeAlias

from flax import nnx

from constrainx.constraints._attach import at_path

Path: TypeAlias = tuple[Any, ...]


def split_at_owner(model: nnx.Module, path: Path) -> tuple[nnx.Module, Path]:
    """Returns the module that a parameter belongs to, and the rest of the path inside it."""
    owner, depth, node = model, 0, model
    for index, step in enumerate(path[:-1]):
        node = at_path(node, (step,))
        # A list cannot have attributes, and the attributes of an `nnx.Dict` are its items.
        if isinstance(node, nnx.Module) and not isinstance(node, nnx.List | nnx.Dict):
            owner, depth = node, index + 1
    return owner, path[depth:]


def format_path(path: Path) -> str:
    """Writes a path as users do: ``blocks.0.kernel``."""
    return ".".join(map(str, path))
