"""`lstsq`: least squares as a differentiable operation on pytrees."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from constrainx.errors import ArgumentError, ArgumentTypeError
from constrainx.linalg import _derivative as _  # noqa: F401  registers the derivative
from constrainx.linalg import _vector
from constrainx.linalg._axes import check_no_named_axes, check_not_varying
from constrainx.linalg._info import Info
from constrainx.linalg._linearity import check_linear, has_custom_vjp
from constrainx.linalg._lsmr import LSMR
from constrainx.linalg._operator import structure, transpose
from constrainx.linalg._primitive import solve
from constrainx.linalg._probe import looks_linear, report_linearity
from constrainx.linalg._problem import Solver
from constrainx.linalg._spec import Damping, Spec, intern_spec
from constrainx.linalg._validate import check_fits, check_floating, check_solver, describe
from constrainx.linalg._vector import Scalar, Vector


def lstsq(
    matvec: Callable[..., Vector],
    b: PyTree,
    *args: Any,
    like: PyTree | None = None,
    damp: float | Array = 0.0,
    x0: PyTree | None = None,
    preconditioner: PyTree | None = None,
    reference: float | Array | None = None,
    solver: Solver = LSMR(),
    full_rank: bool = False,
    is_linear: bool = False,
) -> tuple[Vector, Info]:
    """Minimises ‖A x − b‖² + damp²‖x‖², with A known only by ``matvec(v, *args)`` = A v.

    Where the minimiser is not unique, returns the one of minimum norm. Vectors are pytrees and are
    never ravelled; the transpose of A comes from JAX. Whatever in ``matvec`` does not depend on
    ``v``, such as the forward pass under a Jacobian-vector product, is computed once, outside of
    the solver's loop.

    The result has derivatives of all orders, in forward and reverse mode, with respect to ``args``,
    to arrays that ``matvec`` closes over, to ``b`` and to ``damp``. They are right also where A
    does not have full rank, as long as its rank does not change. A gradient costs at most three
    further solves, two with ``full_rank``, and no memory that grows with the iterations. With
    damping and without ``full_rank`` it may take two more, and the gradient for ``damp`` a few
    more.

    >>> import jax, jax.numpy as jnp, constrainx as cx
    >>> A = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> x, info = cx.lstsq(lambda v, A: A @ v, jnp.ones(3), A, like=jnp.zeros(2))
    >>> print(x.round(3), info.converged)
    [-1.  1.] True
    >>> gradient = jax.grad(lambda A: cx.lstsq(lambda v: A @ v, jnp.ones(3), like=x)[0].sum())(A)
    >>> print(gradient[0].round(3))
    [-0.25  0.25]

    Args:
        matvec: a function ``(v, *args) -> A v``, linear in ``v``.
        b: the right-hand side, a pytree of floating-point arrays.
        *args: passed on to ``matvec``.
        like: what x looks like: a pytree of arrays or of `jax.ShapeDtypeStruct`. May be left out
            where ``x0`` is given. Each leaf of x gets the dtype of its leaf here, and ``matvec`` is
            called with that dtype, but the solver computes in float32 at least.
        damp: a number or a scalar array.
        x0: where to start. It saves iterations, and changes the result only where the minimiser
            is not unique: the solution is then the minimiser nearest to ``x0``.
        preconditioner: positive weights d, shaped like x. The solver works in z = x / d, which
            saves iterations where the columns of A have different scales. Where the minimiser is
            not unique, the result is the one that minimises ‖x / d‖. A weight of zero holds an
            entry of x where it starts.
        reference: what an iterative solver compares residuals with: it may stop once their norm is
            rtol times this. ‖b‖ if left out, or if that is larger.
        solver: `LSMR`, `CG`, `Cholesky`, `QR`, or any object with their ``solve`` method.
        full_rank: a promise that A has as many independent rows or columns as its smaller side. It
            makes gradients cheaper; if it is not true, they are wrong.
        is_linear: a promise that ``matvec`` is linear, like the functions that `jax.linearize`
            returns, so that this need not be checked.

    Returns:
        The solution, and an `Info` with ``converged``, ``reason`` and ``iterations``.
    """
    check_not_varying(b=b, args=args, x0=x0, preconditioner=preconditioner, damp=damp)
    like = _check_like(like, x0)
    check_solver(solver)
    b = jax.tree.map(jnp.asarray, b)
    check_floating("b", b)

    rows, known_linear = _check_matvec(matvec, like, args, b, is_linear=is_linear)
    columns = jax.tree.map(_in_working_dtype, like)
    rows = jax.tree.map(_in_working_dtype, jax.tree.map(_wider, rows, b))
    b = _vector.cast(b, rows)

    def in_working_dtype(linear: Callable[[Vector], Vector]) -> Callable[[Vector], Vector]:
        return lambda v: _vector.cast(linear(_vector.cast(v, like)), rows)

    apply = in_working_dtype(_hoist_constants(lambda v: matvec(v, *args), like))
    linear = None
    if not known_linear:
        as_given = in_working_dtype(lambda v: matvec(v, *args))
        linear = looks_linear(as_given, transpose(apply, columns), columns)
    weight, damping = _check_damp(damp, _vector.scalar_dtype(rows, columns))
    if weight is not None and (x0 is not None or preconditioner is not None):
        # What is damped is the norm of x, neither that of x − x0 nor that of x / preconditioner.
        apply, b = _append_damping(apply, b, weight, columns)
        full_rank, damping = full_rank or damping == "nonzero", "none"
    if reference is not None:
        reference = _check_reference(reference, _vector.safe_norm(b))
    start = weights = None
    if x0 is not None:
        start = _check_like_x("x0", x0, columns)
        if reference is None:
            reference = jax.lax.stop_gradient(_vector.safe_norm(b))
        b = _vector.subtract(b, apply(start))
    if preconditioner is not None:
        weights = _check_like_x("preconditioner", preconditioner, columns)
        apply = _scale_columns(apply, weights)

    jaxpr, constants = _with_constants_as_arguments(apply, columns)
    check_no_named_axes(jaxpr)
    spec = intern_spec(
        Spec(
            jaxpr=jaxpr,
            columns=columns,
            rows=structure(b),
            solver=solver,
            damping=damping,
            full_rank=full_rank,
            has_reference=reference is not None,
        )
    )
    x, info = solve(spec, constants, b, weight, reference)
    info = info if linear is None else report_linearity(info, linear)
    x = x if weights is None else jax.tree.map(jnp.multiply, weights, x)
    x = x if start is None else _vector.add(start, x)
    return _vector.cast(x, like), info


def _hoist_constants(
    matvec: Callable[[Vector], Vector], columns: PyTree
) -> Callable[[Vector], Vector]:
    """The same linear function, with everything that does not depend on v computed in advance."""
    if has_custom_vjp(jax.make_jaxpr(matvec)(columns).jaxpr):  # which cannot be linearised
        return matvec
    return jax.linearize(matvec, _vector.zeros_like(columns))[1]


def _append_damping(
    apply: Callable[[Vector], Vector], b: Vector, damp: Scalar, columns: PyTree
) -> tuple[Callable[[Vector], Vector], Vector]:
    """Damping as rows: [A; λI] x ≈ (b, 0)."""
    return lambda v: (apply(v), _vector.scale(damp, v)), (b, _vector.zeros_like(columns))


def _scale_columns(
    apply: Callable[[Vector], Vector], weights: Vector
) -> Callable[[Vector], Vector]:
    return lambda z: apply(jax.tree.map(jnp.multiply, weights, z))


def _with_constants_as_arguments(
    apply: Callable[[Vector], Vector], columns: PyTree
) -> tuple[jex.ClosedJaxpr, list[Array]]:
    """A jaxpr (constants, v) ↦ A v, and the constants: all arrays that ``apply`` closes over."""
    closed = jax.make_jaxpr(apply)(columns)

    def open_apply(constants: list[Array], leaves: list[Array]) -> list[Array]:
        return jex.jaxpr_as_fun(jex.ClosedJaxpr(closed.jaxpr, constants))(*leaves)

    constants = list(closed.consts)
    return jax.make_jaxpr(open_apply)(structure(constants), jax.tree.leaves(columns)), constants


def _check_like(like: PyTree | None, x0: PyTree | None) -> PyTree[jax.ShapeDtypeStruct]:
    like = x0 if like is None else like
    if like is None:
        raise ArgumentTypeError(
            "`lstsq` needs `like=`: what the solution looks like, as a pytree of arrays or of "
            "`jax.ShapeDtypeStruct`. It cannot be read off a matrix-free A. For a matrix: "
            "`like=jnp.zeros(A.shape[1])`."
        )
    if any(
        not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") for leaf in jax.tree.leaves(like)
    ):
        like = jax.tree.map(jnp.asarray, like)
    check_floating("like", like)
    return structure(like)


def _check_matvec(
    matvec: Callable[..., Vector], like: PyTree, args: tuple, b: Vector, *, is_linear: bool
) -> tuple[PyTree[jax.ShapeDtypeStruct], bool]:
    """What ``matvec`` returns, and whether its operations tell that it is linear."""
    if not callable(matvec):
        raise ArgumentTypeError(
            f"`matvec` must be a function (v, *args) -> A v, got {type(matvec).__name__}. For a "
            "matrix A: `lstsq(lambda v, A: A @ v, b, A, like=jnp.zeros(A.shape[1]))`."
        )

    def apply(v: Vector) -> Vector:
        return matvec(v, *args)

    try:
        closed, rows = jax.make_jaxpr(apply, return_shape=True)(like)
    except Exception as error:
        # The mistake may be in `matvec` itself, so its traceback must stay.
        error.add_note(f"`lstsq` called `matvec` with a vector like `like`, {describe(like)}.")
        raise
    check_not_varying(matvec=closed.consts)
    check_floating("matvec(v, *args)", rows)
    check_fits("b", b, rows, "what `matvec` returns for a vector shaped like `like`")
    return structure(rows), is_linear or check_linear(closed, apply, like, rows)


def _check_like_x(name: str, vector: PyTree, columns: PyTree) -> Vector:
    vector = jax.tree.map(jnp.asarray, vector)
    check_floating(name, vector)
    check_fits(name, vector, columns, "the solution, that is `like`")
    return _vector.cast(vector, columns)


def _check_damp(damp: Any, dtype: jnp.dtype) -> tuple[Scalar | None, Damping]:
    """The damping as an array, and what is known of it now."""
    if isinstance(damp, numbers.Real):
        if not math.isfinite(damp):
            raise ArgumentError(f"`damp` must be finite, got {damp!r}.")
        if damp == 0:
            return None, "none"
        return jnp.asarray(damp, dtype), "nonzero"
    damp = jnp.asarray(damp)
    if damp.shape != () or not jnp.issubdtype(damp.dtype, jnp.floating):
        raise ArgumentTypeError(
            f"`damp` must be a number or a floating-point scalar, got shape {damp.shape} and dtype "
            f"{damp.dtype}."
        )
    return damp.astype(dtype), "unknown"


def _check_reference(reference: Any, norm: Scalar) -> Scalar:
    try:
        value = jnp.asarray(reference, norm.dtype)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"`reference` must be a number or a scalar, got {reference!r}."
        ) from error
    if value.shape != ():
        raise ArgumentTypeError(
            f"`reference` must be a number or a scalar, got shape {value.shape}."
        )
    return jax.lax.stop_gradient(jnp.maximum(value, norm))


def _in_working_dtype(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, _vector.working_dtype(leaf.dtype))


def _wider(left: Any, right: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(left.shape, jnp.promote_types(left.dtype, right.dtype))
