"""What a model has learnt, kept as it is at given points."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PyTree

from constrainx.constraints._constraint import Constraint, Placement
from constrainx.constraints._numbers import as_count
from constrainx.errors import ArgumentError, ArgumentTypeError, did_you_mean


class Kept(NamedTuple):
    """Points, and what the outputs there are to be.

    Attributes:
        points: arrays with the points along the first axis.
        outputs: what ``of`` returned for them.
        weights: one for each point, or zero for one that does not count.
    """

    points: PyTree[Array]
    outputs: PyTree[Array]
    weights: Float[Array, " points"]


@runtime_checkable
class Drawable(Protocol):
    """Examples that `Unchanged` can draw from, such as a `cx.data.Memory`."""

    def draw(self, count: int, key: Array) -> tuple[PyTree, Array]:
        """So many examples, and a weight for each: zero where there is none."""
        ...

    def everything(self) -> tuple[PyTree, Array]:
        """All examples, with their weights."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class _Held:
    """What a constraint holds, which is equal to nothing else: arrays have no hash."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Unchanged(Constraint):
    """f(x) = what it was, at given points: a row for each output of each point.

    It keeps what was learnt while all parameters go on learning: for a sequence of tasks, for
    edits, and for fine-tuning. It is exact at the points of a step if ``damping`` is zero, as far
    as the network has parameters enough, and says nothing about other points. Points can be

    - arrays, which the constraint holds together with the outputs that ``reference`` has for them
      now. With ``examples=n``, each step draws n of them.
    - an entry of the batch. ``reference`` is then a model, whose present state is copied and
      compared with, or the name of another entry, with the outputs.
    - an entry of a `cx.data.Memory` that is a part of the model, see ``memory``.

    A residual depends on its own example alone, so the step needs no row as large as the network.
    To hold some points exactly and others softly, use two such constraints in one step.

    >>> import jax, jax.numpy as jnp, constrainx as cx
    >>> from flax import nnx
    >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    >>> points = jnp.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> kept = cx.compose(cx.Unchanged(model, points), model=model)
    >>> parameters = nnx.state(model, nnx.Param)
    >>> wanted = jax.tree.map(jnp.ones_like, parameters)
    >>> found = cx.project(wanted, kept, parameters).update
    >>> print([f"{value:.2f}" for value in found["kernel"][...].ravel()], found["bias"][...] < 0)
    ['0.33', '0.33', '1.00'] [ True]

    Attributes:
        reference: a model, a function of the points, or the outputs themselves; or the name of the
            entry that has them, in the batch or the memory.
        points: arrays with the points along the first axis, or the name of an entry.
        of: (model, points) ↦ outputs or features, batched; by default ``model(points)``.
        memory: model ↦ where to draw points from: an object like `cx.data.Memory`.
        examples: how many points each step looks at; None for all.
        gamma: the fraction of what has changed that a step takes back.
        placement: "twice", because these are points that a network was able to meet before.
    """

    reference: Any
    points: Any
    of: Callable[[Any, Any], PyTree[Float[Array, ...]]] | None = None
    _: dataclasses.KW_ONLY
    memory: Callable[[Any], Drawable] | None = None
    gamma: float | Callable[[Any], Any] = 0.3
    placement: Placement | None = "twice"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("of", "memory"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ArgumentTypeError(
                    f"`Unchanged({name}=...)` must be a function of the model, got {value!r}. "
                    f"Write `{name}=lambda model{', points' if name == 'of' else ''}: ...`."
                )
        if isinstance(self.points, str):
            self._check_names()
            if isinstance(self.reference, nnx.Module):
                frozen = nnx.clone(self.reference)
                frozen.eval()
                self._set("reference", frozen)
        elif not isinstance(self.points, _Held):
            self._hold()

    def _check_names(self) -> None:
        is_name = isinstance(self.reference, str)
        if self.memory is not None and not is_name:
            raise ArgumentTypeError(
                "`Unchanged(reference=...)` must be the name of the memory's entry with the "
                f"outputs where `memory` is given, got {type(self.reference).__name__}."
            )
        if not is_name and not callable(self.reference):
            raise ArgumentTypeError(
                "`Unchanged(reference=...)` must be a model, a function of the points, or the name "
                f"of an entry with the outputs where `points={self.points!r}` is the name of one, "
                f"got {type(self.reference).__name__}."
            )

    def _hold(self) -> None:
        """Takes arrays as they are now, with the outputs for them."""
        if self.memory is not None:
            raise ArgumentTypeError(
                "`Unchanged(points=...)` must be the name of the memory's entry with the points "
                f"where `memory` is given, got {type(self.points).__name__}."
            )
        points = jax.tree.map(jnp.asarray, self.points)
        count = _count(points, argument="points")
        if self.examples is not None and self.examples > count:
            raise ArgumentError(
                f"`Unchanged(examples={self.examples})` must be at most the {count} points."
            )
        if callable(self.reference):
            outputs = self._evaluate(self.reference, points)
        else:
            outputs = jax.tree.map(jnp.asarray, self.reference)
        if _count(outputs, argument="reference") != count:
            raise ArgumentError(
                "`Unchanged(reference=...)` must have an output for each point: there are "
                f"{count} points and {_count(outputs, argument='reference')} outputs."
            )
        self._set("points", points)
        self._set("reference", outputs)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, _Held(value))

    def _evaluate(self, reference: Any, points: PyTree) -> PyTree[Array]:
        """The outputs of a reference model, in evaluation mode."""
        if isinstance(reference, nnx.Module):
            reference = nnx.clone(reference)
            reference.eval()
            return self._outputs(reference, points)
        # A function of the points is not a model with features.
        return reference(points)

    def _outputs(self, model: Any, points: PyTree) -> PyTree[Array]:
        return model(points) if self.of is None else self.of(model, points)

    def look_at(self, model: Any, batch: Any, key: Array) -> Kept:
        """Returns the points of this step with their outputs, `examples` of them."""
        if isinstance(batch, Kept):
            return batch
        if self.memory is not None:
            source = self._find_memory(model)
            if self.examples is None:
                return self._name(*source.everything(), what="memory")
            return self._name(*source.draw(self.examples, key), what="memory")
        kept = self._everything(model, batch)
        count = len(kept.weights)
        if isinstance(self.points, str) or self.examples in (None, count):
            return jax.tree.map(lambda leaf: leaf[: self.examples], kept)
        chosen = jax.random.permutation(key, count)[: self.examples]
        return jax.tree.map(lambda leaf: leaf[chosen], kept)

    def _everything(self, model: Any, batch: Any) -> Kept:
        """All points there are."""
        if self.memory is not None:
            return self._name(*self._find_memory(model).everything(), what="memory")
        if isinstance(self.points, _Held):
            weights = jnp.ones(_count(self.points.value, argument="points"))
            return Kept(self.points.value, self.reference.value, weights)
        points = _select(batch, self.points, what="batch")
        weights = jnp.ones(_count(points, argument="points"))
        if isinstance(self.reference, str):
            return Kept(points, _select(batch, self.reference, what="batch"), weights)
        is_held = isinstance(self.reference, _Held)
        reference = self.reference.value if is_held else self.reference
        outputs = self._outputs(reference, points) if is_held else reference(points)
        return Kept(points, jax.lax.stop_gradient(outputs), weights)

    def _find_memory(self, model: Any) -> Drawable:
        assert self.memory is not None
        source = self.memory(model)
        if not isinstance(source, Drawable):
            raise ArgumentTypeError(
                "`Unchanged(memory=...)` must return a `cx.data.Memory` or an object with `draw` "
                f"and `everything`, got {type(source).__name__}."
            )
        return source

    def _name(self, examples: Any, weights: Array, *, what: str) -> Kept:
        points = _select(examples, self.points, what=what)
        outputs = _select(examples, self.reference, what=what)
        return Kept(points, jax.lax.stop_gradient(outputs), weights)

    def residual(self, model: Any, batch: Any, *, key: Array) -> PyTree[Float[Array, "points ..."]]:
        """Returns f(x) − what it was for each point."""
        kept = self.look_at(model, batch, key)

        def differ(now: Array, before: Array) -> Array:
            if now.shape != before.shape:
                raise ArgumentError(
                    f"constraint {self.label!r} compares outputs of shape {now.shape} with a "
                    f"reference of shape {before.shape}: they must be those of the same `of`."
                )
            weights = kept.weights.reshape(-1, *(1,) * (now.ndim - 1)).astype(now.dtype)
            return weights * (now - before)

        return jax.tree.map(differ, self._outputs(model, kept.points), kept.outputs)

    def violation(self, model: Any, batch: Any, key: Array) -> Float[Array, ""]:
        """Returns the root mean square of the change, over all points there are."""
        kept = self._everything(model, batch)
        return _root_mean_square(self.residual(model, kept, key=key), kept.weights)

    def scale(self, model: Any, batch: Any, key: Array) -> Float[Array, ""]:  # noqa: ARG002
        """Returns the root mean square of the outputs as they were."""
        kept = self._everything(model, batch)
        return _root_mean_square(kept.outputs, kept.weights)


def _root_mean_square(tree: PyTree, weights: Array) -> Float[Array, ""]:
    """Over the points that count; zero if there is none."""
    rows = [jnp.square(leaf.astype(jnp.float32)).reshape(len(leaf), -1) for leaf in _leaves(tree)]
    squares = jnp.mean(jnp.concatenate(rows, axis=1), axis=1)
    total = jnp.sum(weights)
    mean = jnp.sum(jnp.where(weights > 0, squares, 0)) / jnp.where(total > 0, total, 1)
    return jnp.sqrt(mean)


def _select(batch: Any, name: str, *, what: str) -> Any:
    try:
        return batch[name]
    except (KeyError, TypeError, IndexError):
        names = sorted(map(str, batch)) if isinstance(batch, dict) else []
        has = str(names) if names else type(batch).__name__
        raise ArgumentError(
            f"`Unchanged` looks up {name!r} in the {what}, which has {has}."
            f"{did_you_mean(name, names)}"
        ) from None


def _count(tree: PyTree, *, argument: str) -> int:
    """The length of the first axis, which all arrays share."""
    lengths = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in _leaves(tree)}
    if len(lengths) != 1 or 0 in lengths:
        raise ArgumentError(
            f"`Unchanged({argument}=...)` must be arrays with the points along a first axis that "
            f"they share, got lengths {sorted(lengths)}."
        )
    return as_count(lengths.pop(), argument=f"Unchanged({argument}=...)")


def _leaves(tree: PyTree) -> list[Any]:
    return jax.tree.leaves(tree)
