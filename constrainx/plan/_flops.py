"""Counts the multiplications and additions of a step, from its jaxpr."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

Kind: TypeAlias = Literal["half", "tf32", "float32", "float64"]


@dataclasses.dataclass(frozen=True)
class Flops:
    """How much there is to compute, for all devices together, by kind of number.

    Only products of matrices and convolutions count: all else takes no longer than to read and
    write it. Float32 is rounded to TF32 on GPUs, except where a higher precision is asked for.

    Attributes:
        once: in each step.
        iterated: in each iteration of loops whose length depends on the data, such as LSMR's.
    """

    once: Mapping[Kind, float]
    iterated: Mapping[Kind, float]


def count_flops(jaxpr: Any) -> Flops:
    """Counts what a jaxpr computes; a branch counts as the one that computes most.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.ones((2, 3))
    >>> count_flops(jax.make_jaxpr(lambda x: x @ x.T)(x)).once
    {'tf32': 24.0}
    """
    once, iterated = _count(getattr(jaxpr, "jaxpr", jaxpr))
    return Flops(dict(once), dict(iterated))


# A `Counter` is typed for whole numbers, and these are too large to be sure of.
Counts: TypeAlias = Any


def _count(jaxpr: Any) -> tuple[Counts, Counts]:
    once: Counts = collections.Counter()
    iterated: Counts = collections.Counter()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            once[_kind(eqn)] += _count_dot(eqn)
        elif name == "conv_general_dilated":
            once[_kind(eqn)] += _count_convolution(eqn)
        elif name == "cond":
            found = [_count(branch.jaxpr) for branch in eqn.params["branches"]]
            most = max(found, key=lambda both: both[0].total() + both[1].total())
            once.update(most[0])
            iterated.update(most[1])
        else:
            times = eqn.params["length"] if name == "scan" else 1
            for inner in _inner(eqn):
                more, in_loop = _count(inner)
                (iterated if name == "while" else once).update(_scale(more, times))
                iterated.update(_scale(in_loop, times))
    return once, iterated


def _inner(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation calls."""
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield getattr(value, "jaxpr", value)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)


def _scale(counts: Counts, times: int) -> dict[Kind, float]:
    return {kind: times * count for kind, count in counts.items()}


def _count_dot(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left, out = eqn.invars[0].aval, eqn.outvars[0].aval
    return 2.0 * math.prod(out.shape) * math.prod(left.shape[axis] for axis in contracted)


def _count_convolution(eqn: Any) -> float:
    kernel, out = eqn.invars[1].aval, eqn.outvars[0].aval
    spec = eqn.params["dimension_numbers"].rhs_spec
    # The kernel's own input channels are those of one group.
    window = math.prod(kernel.shape[axis] for axis in spec[1:])
    # Zeros that are put between the entries cost nothing.
    return 2.0 * math.prod(out.shape) * window / math.prod(eqn.params["lhs_dilation"])


def _kind(eqn: Any) -> Kind:
    dtype = jnp.promote_types(*(var.aval.dtype for var in eqn.invars[:2]))
    if dtype in (jnp.float64, jnp.complex128):
        return "float64"
    if dtype.itemsize <= 2:
        return "half"
    precision = eqn.params.get("precision")
    chosen = precision if isinstance(precision, tuple) else (precision,)
    is_exact = any(one == jax.lax.Precision.HIGHEST for one in chosen)
    return "float32" if is_exact else "tf32"
