"""Holds functions to the shapes and types that their array annotations promise.

Only annotations of arrays are checked. The others belong to mypy, and many tests pass a wrong value
on purpose, to read the error that the library has for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import jax
import jaxtyping
from beartype import beartype

# Functions whose annotations are known to be wrong. Mend and delete them; never add to these.
KNOWN = {
    "constrainx.constraints.groups._orthogonal._OrthogonalMatrices.matrix",
    "constrainx.constraints.representations._rotate",
    "constrainx.linalg._cholesky._inner_products",
    "constrainx.linalg._derivative._jvp",
    "constrainx.linalg._derivative._jvp.<locals>.rule",
    "constrainx.linalg._lstsq._with_constants_as_arguments",
    "constrainx.linalg._lstsq.lstsq",
    "constrainx.linalg._primitive.solve",
    "constrainx.step._jacobian._run_equation",
}


def check_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function in a check of its array annotations, for jaxtyping's import hook."""
    if f"{function.__module__}.{function.__qualname__}" in KNOWN:
        return function
    function.__annotations__ = {
        name: hint if _names_arrays(hint) else Any
        for name, hint in function.__annotations__.items()
    }
    return beartype(function)


def _names_arrays(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jax.Array | jaxtyping.AbstractArray):
        return True
    leaf = getattr(hint, "leaftype", None)  # of `PyTree[leaf]`
    return any(map(_names_arrays, get_args(hint) if leaf is None else (leaf,)))
