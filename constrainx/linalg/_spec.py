"""What is static about a solve: the jaxpr of A, its shapes, the solver, and what is promised."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.extend
from jaxtyping import Array, PyTree

from constrainx.linalg import _vector
from constrainx.linalg._fingerprint import fingerprint
from constrainx.linalg._linearity import has_custom_vjp
from constrainx.linalg._operator import LinearOperator, structure
from constrainx.linalg._operator import transpose as transposed
from constrainx.linalg._problem import Solver
from constrainx.linalg._vector import Vector

Damping: TypeAlias = Literal["none", "nonzero", "unknown"]


@dataclasses.dataclass(frozen=True, eq=False)
class Spec:
    """All that is static about a solve. Compared by identity: get one from `intern_spec`.

    Attributes:
        jaxpr: (constants, leaves of v) ↦ leaves of A v.
        columns: shapes and dtypes of v.
        rows: shapes and dtypes of A v.
        solver: the solver.
        damping: what is known of the damping while tracing.
        full_rank: the caller's promise that A has the rank of its smaller side.
        has_reference: whether an operand says what to compare the norm of a residual with.
    """

    jaxpr: jax.extend.core.ClosedJaxpr
    columns: PyTree
    rows: PyTree
    solver: Solver
    damping: Damping
    full_rank: bool
    has_reference: bool = False

    @functools.cached_property
    def T(self) -> Spec:
        """The same for Aᵀ."""

        def rmatvec(constants: Sequence[Array], u: Vector) -> Vector:
            return transposed(functools.partial(self.apply, constants), self.columns)(u)

        transpose = dataclasses.replace(
            self,
            jaxpr=jax.make_jaxpr(rmatvec)(self.constants, self.rows),
            columns=self.rows,
            rows=self.columns,
            has_reference=False,
        )
        transpose.__dict__["T"] = self.without_reference
        return transpose

    @functools.cached_property
    def augmented(self) -> Spec:
        """The same for [A; λI] without damping; λ is its last constant."""

        def matvec(constants: Sequence[Array], v: Vector) -> tuple[Vector, Vector]:
            *constants, damp = constants
            return self.apply(constants, v), _vector.scale(damp, v)

        damp = jax.ShapeDtypeStruct((), _vector.scalar_dtype(self.columns, self.rows))
        return dataclasses.replace(
            self,
            jaxpr=jax.make_jaxpr(matvec)([*self.constants, damp], self.columns),
            rows=(self.rows, self.columns),
            damping="none",
            full_rank=self.full_rank or self.damping == "nonzero",
            has_reference=False,
        )

    @functools.cached_property
    def undamped(self) -> Spec:
        """The same without damping."""
        return dataclasses.replace(self, damping="none", has_reference=False)

    @functools.cached_property
    def without_reference(self) -> Spec:
        """The same for a right-hand side of its own."""
        return dataclasses.replace(self, has_reference=False) if self.has_reference else self

    @property
    def constants(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of what the matvec closes over."""
        avals = self.jaxpr.in_avals
        return structure(avals[: len(avals) - len(jax.tree.leaves(self.columns))])

    @property
    def tall(self) -> bool:
        """Whether A has at least as many rows as columns."""
        return _vector.size(self.rows) >= _vector.size(self.columns)

    @property
    def wide(self) -> bool:
        """Whether A has at most as many rows as columns."""
        return _vector.size(self.rows) <= _vector.size(self.columns)

    def apply(self, constants: Sequence[Array], v: Vector) -> Vector:
        """A v."""
        leaves = jax.extend.core.jaxpr_as_fun(self.jaxpr)(*constants, *jax.tree.leaves(v))
        return jax.tree.unflatten(jax.tree.structure(self.rows), leaves)

    def push(self, constants: Sequence[Array], tangent: Vector) -> Vector:
        """A v for a tangent v, in a form that JAX can transpose."""
        apply = functools.partial(self.apply, constants)
        if not has_custom_vjp(self.jaxpr.jaxpr):
            return apply(tangent)
        return jax.jvp(apply, (_vector.zeros_like(tangent),), (tangent,))[1]

    def operator(self, constants: Sequence[Array]) -> LinearOperator:
        """A as a solver sees it."""
        return LinearOperator(
            functools.partial(self.apply, constants),
            functools.partial(self.T.apply, constants),
            self.columns,
            self.rows,
        )

    def split(self, operands: Sequence[Any]) -> tuple[list, list, list]:
        """Operands as constants, leaves of b, and the scalars: damping and reference, if any."""
        first, second = len(self.constants), len(jax.tree.leaves(self.rows))
        return (
            list(operands[:first]),
            list(operands[first : first + second]),
            list(operands[first + second :]),
        )


def intern_spec(spec: Spec) -> Spec:
    """The first spec that was equal to this one, for which JAX has compiled code already."""
    key = (
        fingerprint(spec.jaxpr),
        *(_hashable(tree) for tree in (spec.columns, spec.rows)),
        *(spec.solver, spec.damping, spec.full_rank, spec.has_reference),
    )
    return _first_with(_Keyed(key, spec))


class _Keyed:
    """Carries a spec past a cache that looks at the key alone."""

    def __init__(self, key: Hashable, spec: Spec):
        self.key, self.spec = key, spec

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and self.key == other.key


@functools.lru_cache(maxsize=512)
def _first_with(keyed: _Keyed) -> Spec:
    return keyed.spec


def _hashable(tree: PyTree) -> Hashable:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
