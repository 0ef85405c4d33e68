"""Holds functions to the shapes and types that their array annotations promise.

Only annotations of arrays are checked. The others belong to mypy, and many tests pass a wrong value
on purpose, to read the error that the library has for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args, get_origin

import jaxtyping
from beartype import beartype


def check_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function in a check of its array annotations, for jaxtyping's import hook."""
    function.__annotations__ = {
        name: hint if _names_arrays(hint) else Any
        for name, hint in function.__annotations__.items()
    }
    return beartype(function)


def _names_arrays(hint: Any) -> bool:
    """Whether an annotation has a dtype or a shape in it.

    `Array` alone has neither, and JAX passes constants of another type to rules of primitives.
    """
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    if get_origin(hint) is Callable:  # whose arguments cannot be seen before it is called
        return False
    leaf = getattr(hint, "leaftype", None)  # of `PyTree[leaf]`
    return any(map(_names_arrays, get_args(hint) if leaf is None else (leaf,)))
