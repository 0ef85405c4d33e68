"""One constraint of several, as a function of the parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from constrainx.constraints._attach import Attached, at_path
from constrainx.constraints._constraint import Placement
from constrainx.constraints._explicit import replicate
from constrainx.constraints._on_weights import OnWeights
from constrainx.constraints._view import (
    find_stale,
    keep_read,
    name_leaves,
)
from constrainx.constraints.reductions import Rows
from constrainx.errors import ArgumentError

# What a schedule may be below zero where it should be zero.
ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Member:
    """One constraint of several, as a function of the parameters.

    Attributes:
        name: unique among its siblings.
        function: (parameters, batch, key, module) ↦ rows. If the rows change from step to step, it
            takes ``step=``, too, see `at`.
        gamma: a number or an Optax schedule.
        damping: how soft its rows are, a number or an Optax schedule.
        start: the first step at which it acts.
        stop: the first step at which it no longer acts, or None.
        every: it acts at every multiple of this many steps after ``start``.
        tolerance: the root mean square of its rows at which it counts as met.
        kind: whether rows must be zero or at most zero.
        slices: how many pieces of the batch have a row each, or None if rows share the batch.
        examples: how many examples of the batch it looks at, or None for all.
        placement: where the null-space step projects the rows; None for the default.
        attached: the constraint and the module that it is about; None for a plain function.
        movable: parameters ↦ for each leaf, whether the rows may move it; None for all.
        model: what the constraint is about, as it was handed over; None for a plain function.
        nearest: (parameters, module) ↦ the nearest parameters that satisfy the constraint, if it
            knows them; None otherwise. It takes ``step=`` where ``function`` does.
        takes_step: whether they do.
        one_sided: whether the rows, which are then at least zero, may fall faster than γ asks.
        on_weights: its own step, if it knows that.
        look: (batch, key, module) ↦ what the function gets as its batch; None for the batch itself.
    """

    name: str
    function: Callable[..., Rows]
    gamma: float | Callable[[Any], Any]
    start: int = 0
    stop: int | None = None
    every: int = 1
    tolerance: float = 1e-3
    damping: float | Callable[[Any], Any] = 0.0
    kind: Literal["equality", "inequality"] = "equality"
    slices: Callable[[PyTree], int] | None = None
    examples: int | None = None
    placement: Placement | None = None
    attached: Attached | None = None
    movable: Callable[[PyTree], tuple[bool, ...]] | None = None
    model: nnx.Module | None = None
    nearest: Callable[..., PyTree] | None = None
    takes_step: bool = False
    one_sided: bool = False
    on_weights: OnWeights | None = None
    look: Callable[[Any, Array, Any], Any] | None = None

    def at(self, step: Array) -> Member:
        """The constraint as it is at a step; before this, it is what must hold in the end."""
        if not self.takes_step:
            return self
        bind = functools.partial
        nearest = None if self.nearest is None else bind(self.nearest, step=step)
        return dataclasses.replace(self, function=bind(self.function, step=step), nearest=nearest)

    def gamma_at(self, step: Array) -> Float[Array, ""]:
        """γ at a step, and not a number where a schedule returns one that is not allowed."""
        return _read_schedule(self.gamma, step)

    def damping_at(self, step: Array) -> Float[Array, ""]:
        """μ at a step, and not a number where a schedule returns one that is not allowed."""
        return _read_schedule(self.damping, step)

    @property
    def is_soft(self) -> bool:
        """Whether its rows may be damped at some step."""
        return callable(self.damping) or self.damping > 0

    def acts_at(self, step: Array) -> Array:
        """Whether the constraint acts at a step."""
        acts = (step >= self.start) & ((step - self.start) % self.every == 0)
        return acts if self.stop is None else acts & (step < self.stop)

    @property
    def acts_always(self) -> bool:
        """Whether there is no step at which the constraint does not act."""
        return self.start == 0 and self.every == 1 and self.stop is None

    @property
    def is_bounded(self) -> bool:
        """Whether a step may leave the rows lower than it is asked to, J u ≤ t."""
        return self.kind == "inequality" or self.one_sided

    def measure(self, model: Any, batch: Any, key: Array) -> Float[Array, ""]:
        """The constraint's own figure of its violation, for the whole model."""
        assert self.attached is not None, "a plain function has no model to be measured on"
        module = at_path(model, self.attached.path)
        return self.attached.constraint.violation(module, batch, key)

    def measure_scale(self, model: Any, batch: Any, key: Array) -> Float[Array, ""] | None:
        """What that figure is compared with, for the whole model; None if nothing is."""
        assert self.attached is not None, "a plain function has no model to be measured on"
        return self.attached.constraint.scale(at_path(model, self.attached.path), batch, key)

    @property
    def has_scale(self) -> bool:
        """Whether that figure is compared with anything."""
        return self.attached is not None and self.attached.constraint.has_scale

    def hold(self, parameters: PyTree) -> PyTree:
        """The parameters, without a derivative for those that the rows may not move."""
        if self.movable is None:
            return parameters
        leaves, tree = jax.tree.flatten(parameters)
        moves = self.movable(parameters)
        held = [
            leaf if moving else jax.lax.stop_gradient(leaf)
            for leaf, moving in zip(leaves, moves, strict=True)
        ]
        return jax.tree.unflatten(tree, held)

    def view(self, batch: Any, key: Array, model: Any) -> Any:
        """The part of a batch that the constraint looks at, or points of its own."""
        if self.look is not None:
            batch = self.look(batch, key, model)
        return jax.tree.map(lambda leaf: leaf[: self.examples], batch) if self.examples else batch

    def rows(self, parameters: PyTree, batch: Any, key: Array, model: Any) -> Rows:
        """All rows."""
        batch = self.view(batch, key, model)
        if self.slices is None:
            return self.function(parameters, batch, key, model)
        pieces = cut_batch(batch, key, self.slices(batch))

        def row(piece: Any, key: Array) -> Float[Array, ""]:
            return self.function(parameters, piece, key, model)[0]

        return jax.vmap(row)(*pieces)

    def check_current(
        self, parameters: PyTree, batch: Any, key: Array, model: Any, *, fix: str
    ) -> None:
        """Raises where the rows depend on state of the model that may be older than this."""
        seen = self.model if model is None else model
        if seen is None:
            return
        stale, reason = find_stale(seen, parameters, is_given=model is not None)
        if stale:
            stale = keep_read(lambda m: self.rows(parameters, batch, key, m), seen, stale)
        if stale:
            names = ", ".join(".".join(map(str, path)) for path in stale[:3])
            more = f" and {len(stale) - 3} more" if len(stale) > 3 else ""
            raise ArgumentError(
                f"constraint {self.name!r} needs the model as it is now, but {reason} its "
                f"{names}{more} cannot be known: {fix}."
            )

    def find_hidden(self, parameters: PyTree, hidden: PyTree, batch: Any, key: Array) -> list[str]:
        """The variables that the rows depend on, of those that a mask hides from the optimizer.

        Args:
            parameters: as the optimizer hands them over, without what is hidden.
            hidden: for each of them, and for what is hidden, whether it is.
            batch: for the constraint.
            key: for the constraint.
        """
        if self.model is None:
            return []
        paths = [path for path, is_hidden in name_leaves(hidden).items() if is_hidden]
        read = keep_read(lambda m: self.rows(parameters, batch, key, m), self.model, paths)
        return [".".join(map(str, path)) for path in read]


def _read_schedule(value: float | Callable[[Any], Any], step: Array) -> Float[Array, ""]:
    """A number at a step, and not a number where a schedule returns one that is not allowed."""
    if not callable(value):
        return jnp.asarray(value, float)
    number = jnp.asarray(value(step), float)
    # A schedule that falls to zero may end a rounding below it.
    allowed = jnp.isfinite(number) & (number >= -ROUNDING)
    return jnp.where(allowed, jnp.where(number < 0, 0, number), jnp.nan)


def cut_batch(batch: PyTree, key: Array, pieces: int) -> tuple[PyTree, Array]:
    """The batch cut into pieces, on a new first axis, and a key for each piece."""

    def split(leaf: Array) -> Array:
        # A mesh with explicit axes would have all that is mapped over sharded alike, keys as well.
        return replicate(leaf).reshape(pieces, leaf.shape[0] // pieces, *leaf.shape[1:])

    return jax.tree.map(split, batch), jax.random.split(key, pieces)
