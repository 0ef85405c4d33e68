"""Constraints on selected weights that know their own step, and how a step finds out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, PyTree

from constrainx.constraints._attach import at_path
from constrainx.constraints._restore import restore_variables
from constrainx.constraints._view import view_model

# What these return are entries of what they are given, each at most once.
MOVERS = frozenset(
    ("copy", "reshape", "reshard", "rev", "sharding_constraint", "slice", "squeeze", "transpose")
)
# Functions that are called as they are.
CALLS = frozenset(("pjit", "jit", "closed_call", "core_call"))


class Corrected(NamedTuple):
    """A change of weights that obeys a constraint.

    Attributes:
        change: the nearest one to what was given.
        exists: whether it does all that was asked.
    """

    change: PyTree[Float[Array, ...]]
    exists: Bool[Array, ""] | bool = True


@runtime_checkable
class KnowsItsStep(Protocol):
    """A constraint on weights that needs neither Jacobian nor solver.

    The step uses it where ``select`` returns entries of trained parameters as they are, reshaped,
    transposed, cut or joined, each at most once; elsewhere it uses the rows.
    """

    def select(self, model: Any) -> PyTree[Float[Array, ...]]:
        """Returns the weights that the constraint is about."""
        ...

    def correct(
        self,
        weights: PyTree[Float[Array, ...]],
        change: PyTree[Float[Array, ...]],
        gamma: Float[Array, ""],
    ) -> Corrected:
        """The change v' nearest to v with J v' = −γ c, or ≤ for an inequality."""
        ...


@dataclasses.dataclass(frozen=True)
class OnWeights:
    """Such a constraint as a function of the parameters.

    Attributes:
        constraint: the constraint.
        path: of the module that it is about, in the model.
        model: as it was handed over.
    """

    constraint: Any
    path: tuple[Any, ...]
    model: nnx.Module

    def find_leaves(self, parameters: PyTree, module: Any) -> tuple[int, ...] | None:
        """The parameters that are selected, by number; None if they are not merely selected."""
        return find_selected(lambda p: self._select(p, module), parameters)

    def correct(
        self,
        own: list[Array],
        vector: list[Array],
        gamma: Float[Array, ""],
        put: Callable[[list[Array]], PyTree],
        module: Any,
    ) -> tuple[list[Array], Bool[Array, ""]]:
        """The vector after the constraint, and whether it does all that was asked.

        Args:
            own: the parameters that are selected.
            vector: what is to obey, of their shapes.
            gamma: of the step.
            put: puts the selected parameters among all others.
            module: the model with its current state, or None.
        """

        def select(leaves: list[Array]) -> PyTree:
            return jax.tree.map(_widen, self._select(put(leaves), module))

        weights, transpose = jax.vjp(select, own)
        change = select(vector)
        found = self.constraint.correct(weights, change, gamma)
        (added,) = transpose(jax.tree.map(jnp.subtract, found.change, change))
        moved = [v + a for v, a in zip(vector, added, strict=True)]
        return moved, jnp.asarray(found.exists)

    def _select(self, parameters: PyTree, module: Any) -> PyTree:
        base = self.model if module is None else restore_variables(module, like=self.model)
        seen = view_model(base, parameters, jax.random.key(0))
        return self.constraint.select(at_path(seen, self.path))


def bind_to_weights(constraint: Any, path: tuple[Any, ...], model: nnx.Module) -> OnWeights | None:
    """The constraint as a function of the parameters, if it knows its step and keeps its rows."""
    knows = isinstance(constraint, KnowsItsStep) and constraint.reduce == "none"  # type: ignore[attr-defined]
    return OnWeights(constraint, path, model) if knows else None


def find_selected(
    function: Callable[[PyTree], PyTree], parameters: PyTree
) -> tuple[int, ...] | None:
    """The leaves whose entries a function returns, each at most once, or None if it does more."""
    closed = jax.make_jaxpr(function)(parameters)
    try:
        read = _trace_back(closed.jaxpr, closed.jaxpr.outvars)
    except _NotSelectedError:
        return None
    inputs = {var: index for index, var in enumerate(closed.jaxpr.invars)}
    return tuple(sorted(inputs[var] for var in read))


class _NotSelectedError(Exception):
    """The function does more than to select."""


def _trace_back(jaxpr: jex.Jaxpr, outputs: list[Any]) -> list[Any]:
    """The inputs that outputs come from; raises if an entry may be used twice or changed."""
    producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    inputs = set(jaxpr.invars)
    seen: set[Any] = set()
    read: list[Any] = []

    def visit(var: Any) -> None:
        if isinstance(var, jex.Literal) or var in seen:
            raise _NotSelectedError
        seen.add(var)
        if var in inputs:
            read.append(var)
            return
        eqn = producers.get(var)
        if eqn is None:
            raise _NotSelectedError
        name = eqn.primitive.name
        if name in CALLS:
            called: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            inner = getattr(called, "jaxpr", called)
            position = eqn.outvars.index(var)
            arguments = dict(zip(inner.invars, eqn.invars, strict=True))
            for found in _trace_back(inner, [inner.outvars[position]]):
                visit(arguments[found])
        elif name in MOVERS or name == "concatenate" or _keeps_type(eqn):
            for operand in eqn.invars:
                visit(operand)
        else:
            raise _NotSelectedError

    for var in outputs:
        visit(var)
    return read


def _keeps_type(eqn: Any) -> bool:
    if eqn.primitive.name not in ("convert_element_type", "broadcast_in_dim"):
        return False
    (source, *_), (result,) = eqn.invars, eqn.outvars
    return source.aval.dtype == result.aval.dtype and source.aval.size == result.aval.size


def _widen(array: Array) -> Array:
    """In at least single precision."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))
