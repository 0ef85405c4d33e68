"""Whether the arrays of a checkpoint are those that a trainer expects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

# Parts of the training state that may come and go between runs; they are initialised, or dropped.
OPTIONAL = ("constraints", "ema")


def by_path(state: PyTree) -> dict[str, Any]:
    """The arrays of a state by their path, such as ``parameters.layers.0.kernel``."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


@dataclasses.dataclass(frozen=True)
class Match:
    """How the arrays of a checkpoint compare with those that are wanted.

    Attributes:
        common: paths of those that have the same shape in both.
        missing: paths of those that only the trainer has.
        extra: paths of those that only the checkpoint has.
        reshaped: for each with another shape, a sentence.
        retyped: for each with another dtype, a sentence.
    """

    common: list[str]
    missing: list[str]
    extra: list[str]
    reshaped: dict[str, str]
    retyped: dict[str, str]

    @property
    def faults(self) -> list[str]:
        """Sentences about what keeps the checkpoint from being restored as it is."""
        return [
            *self.reshaped.values(),
            *self.retyped.values(),
            *(f"{path} is missing there" for path in _drop_optional(self.missing)),
            *(f"{path} is there and not here" for path in _drop_optional(self.extra)),
        ]

    @property
    def notes(self) -> list[str]:
        """Sentences about what is not restored although the checkpoint is."""
        new, extra = _sort({*self.missing, *self.reshaped}), _sort(self.extra)
        sentences = [
            f"{describe_paths(new)}: not in the checkpoint, initialised instead" if new else "",
            f"{describe_paths(extra)}: in the checkpoint, not used here" if extra else "",
            f"{describe_paths(self.retyped)}: converted to the dtype used here"
            if self.retyped
            else "",
        ]
        return [sentence for sentence in sentences if sentence]


def compare(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> Match:
    """Compares the arrays that a trainer wants with the list of those in a checkpoint."""
    both = [path for path in wanted if path in stored]
    reshaped = {
        path: f"{path} is {tuple(stored[path].shape)} there and {np.shape(wanted[path])} here"
        for path in both
        if tuple(stored[path].shape) != np.shape(wanted[path])
    }
    common = [path for path in both if path not in reshaped]
    return Match(
        common=common,
        missing=[path for path in wanted if path not in stored],
        extra=[path for path in stored if path not in wanted],
        reshaped=reshaped,
        retyped={
            path: f"{path} is {stored[path].dtype} there and {wanted[path].dtype} here"
            for path in common
            if np.dtype(stored[path].dtype) != np.dtype(wanted[path].dtype)
        },
    )


def describe_paths(paths: Iterable[str], *, most: int = 3) -> str:
    """A few paths, and how many more there are."""
    listed = list(paths)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return f"{', '.join(listed[:most])}{more}"


def initial_value(path: str, initial: Any, found: Mapping[str, Any]) -> Any:
    """The value of an array that a checkpoint lacks.

    An average starts at the parameters, and the constraints' count of steps at that of the run.
    """
    part, _, rest = path.partition(".")
    source = {"ema": f"parameters.{rest}", "constraints": rest}.get(part, "")
    # A copy, because both are donated to the compiled step.
    return jax.numpy.copy(found[source]) if source in found else initial


def constant_hyperparameters(paths: Iterable[str]) -> list[str]:
    """The paths of what `optax.inject_hyperparams` keeps, without what follows a schedule."""
    every = list(paths)
    return [
        path
        for path in every
        if ".hyperparams." in path
        and not any(
            other == scheduled or other.startswith(f"{scheduled}.")
            for scheduled in (path.replace(".hyperparams.", ".hyperparams_states."),)
            for other in every
        )
    ]


def _drop_optional(paths: Iterable[str]) -> list[str]:
    return [path for path in _sort(paths) if path.partition(".")[0] not in OPTIONAL]


def _sort(paths: Iterable[str]) -> list[str]:
    """What the model is made of comes first, because messages show only a few."""
    return sorted(paths, key=lambda path: (not path.startswith("parameters."), path))
