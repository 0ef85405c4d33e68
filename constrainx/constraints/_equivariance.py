"""Equivariance and invariance of a network, or of its features, under a group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from constrainx.constraints._constraint import Constraint
from constrainx.constraints._inputs import select_inputs
from constrainx.constraints.groups import Element, FiniteGroup, Group
from constrainx.constraints.reductions import check_residual
from constrainx.constraints.representations import Representation, Trivial, Vector
from constrainx.errors import ArgumentError, ArgumentTypeError, check_choice

Elements = Literal["auto", "all", "generators", "sample"]

_MOST_LISTED = 16


@dataclasses.dataclass(frozen=True)
class Equivariance(Constraint):
    """f(ρ_in(g) x) = ρ_out(g) f(x) for every g of a group, at the examples of the batch.

    The residual f(ρ_in(g) x) − ρ_out(g) f(x) has shape (examples, elements, *output). All
    transformed examples go through the network in one call, together with the plain ones: with k
    elements that is a batch of 1 + k times the examples. With "all" and "generators" the constraint
    is exact at the examples given; with "sample" it is approximate, since each example gets one
    random element, a new one each step.

    >>> import constrainx as cx
    >>> turns = cx.groups.Cyclic(4)
    >>> constraint = cx.Equivariance(turns, of=lambda m, x: m.features(x), reduce="norm")
    >>> constraint.input
    Image()

    Attributes:
        group: the group, see `groups`.
        of: (model, inputs) ↦ f(inputs), batched; by default the model itself. For intermediate
            features, ``of=lambda model, x: model.features(x)``.
        input: how the group acts on an example; by default ``group.usual_representation``, which is
            `Image()` for Cyclic, Dihedral and Translation, `Permute(axis=0)` for Permutation, and
            `Vector()` for groups of matrices.
        output: how it acts on the output, with the same default.
        inputs: where the examples are in the batch: a key, an attribute or a position. A batch that
            is an array is taken as the examples.
        elements: which g take part. For finite groups "all" of them except the identity, or the
            "generators", of which all others are products. "sample" draws one for each example.
            "auto" is "all" for groups of up to 16 elements and "sample" for others.
    """

    group: Group
    of: Callable[[Any, Array], Array] | None = None
    _: dataclasses.KW_ONLY
    input: Representation | None = None
    output: Representation | None = None
    inputs: str | int = "x"
    elements: Elements = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        if not isinstance(self.group, Group):
            raise ArgumentTypeError(
                f"`{owner}(group=...)` must be a group such as `groups.Cyclic(4)`, got "
                f"{self.group!r}."
            )
        for name in ("input", "output"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.group.usual_representation or Vector())
            if not isinstance(getattr(self, name), Representation):
                raise ArgumentTypeError(
                    f"`{owner}({name}=...)` must be a representation such as "
                    f"`representations.Vector()`, got {getattr(self, name)!r}."
                )
            getattr(self, name).check(self.group)
        object.__setattr__(self, "elements", _resolve_elements(self.elements, self.group, owner))

    def residual(
        self, model: Any, batch: Any, *, key: Array
    ) -> Float[Array, "examples elements ..."]:
        """Returns f(ρ_in(g) x) − ρ_out(g) f(x) for each example and element."""
        x = select_inputs(batch, self.inputs, owner=type(self).__name__)
        elements = self._choose_elements(x.shape[0], key)
        both = jnp.concatenate([x[:, None], self._act(self.input, elements, x)], axis=1)
        # Examples before elements, so that a batch that is sharded by examples stays sharded.
        flat = both.reshape(-1, *x.shape[1:])
        outputs = model(flat) if self.of is None else self.of(model, flat)
        if not isinstance(outputs, jax.Array) or outputs.shape[:1] != flat.shape[:1]:
            raise ArgumentError(
                f"`{type(self).__name__}(of=...)` must return an array with a row for each of the "
                f"{flat.shape[0]} inputs, got {jax.tree.map(jnp.shape, outputs)}."
            )
        check_residual(outputs, owner=self.label)
        outputs = outputs.reshape(*both.shape[:2], *outputs.shape[1:])
        return outputs[:, 1:] - self._act(self.output, elements, outputs[:, 0])

    def violation(self, model: Any, batch: Any, key: Array) -> Float[Array, ""]:
        """Returns the mean over examples and elements of ‖f(ρ_in(g) x) − ρ_out(g) f(x)‖².

        The squared norm is the sum over the output's entries. With "all" the mean is over the whole
        group, including the identity, whose term is zero, so it equals the expectation of "sample".
        """
        residual = self.residual(model, batch, key=key)
        squares = jnp.square(residual.astype(jnp.result_type(jnp.float32, residual)))
        mean = jnp.mean(jnp.sum(squares, axis=tuple(range(2, squares.ndim))))
        if self.elements == "all" and isinstance(self.group, FiniteGroup):
            return mean * (1 - 1 / self.group.order)
        return mean

    def scale(self, model: Any, batch: Any, key: Array) -> Float[Array, ""]:  # noqa: ARG002
        """Returns the mean over examples of ‖f(x)‖²."""
        x = select_inputs(batch, self.inputs, owner=type(self).__name__)
        outputs = model(x) if self.of is None else self.of(model, x)
        squares = jnp.square(outputs.astype(jnp.result_type(jnp.float32, outputs)))
        return jnp.sum(squares) / x.shape[0]

    def _choose_elements(self, examples: int, key: Array) -> Element:
        """Returns NumPy elements that all examples share, or one JAX element for each example."""
        if self.elements == "sample" or not isinstance(self.group, FiniteGroup):
            return self.group.sample(key, examples)
        if self.elements == "generators":
            return self.group.generators
        listed = self.group.elements
        same = (listed == np.asarray(self.group.identity)).reshape(len(listed), -1).all(axis=1)
        return listed[~same]

    def _act(
        self, representation: Representation | None, elements: Element, examples: Array
    ) -> Float[Array, "examples elements ..."]:
        assert representation is not None  # after `__post_init__`

        def act(element: Element, array: Array) -> Array:
            return representation(self.group, element, array)

        if not isinstance(elements, np.ndarray):
            return jax.vmap(act)(elements, examples)[:, None]
        # One by one, because a rotation is cheaper when its number of quarter turns is a constant.
        moved = [jax.vmap(lambda a, e=e: act(e, a))(examples) for e in elements]
        return jnp.stack(moved, axis=1)


@dataclasses.dataclass(frozen=True)
class Invariance(Equivariance):
    """f(ρ(g) x) = f(x) for every g of a group: `Equivariance` with a trivial output.

    >>> import constrainx as cx
    >>> cx.Invariance(cx.groups.Dihedral(4)).label
    'invariance'
    """

    output: Representation | None = dataclasses.field(default=Trivial(), init=False, repr=False)


def _resolve_elements(elements: str, group: Group, owner: str) -> str:
    """Replaces "auto" by what it stands for, and checks that the group has such elements."""
    check_choice(f"{owner}.elements", elements, get_args(Elements))
    if not isinstance(group, FiniteGroup):
        if elements in ("all", "generators"):
            raise ArgumentError(
                f"`{owner}(elements={elements!r})` needs a finite group, got {group}. Use "
                'elements="sample".'
            )
        return "sample"
    if group.order == 1:
        raise ArgumentError(
            f"`{owner}(group={group})` has only the identity, so there is nothing to constrain. "
            "Use a larger group."
        )
    if elements == "auto":
        return "all" if group.order <= _MOST_LISTED else "sample"
    if elements == "all":
        _ = group.elements  # an error for a group too large to list
    return elements
