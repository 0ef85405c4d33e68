"""What cannot work fails at once, with an error that says what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import constrainx as cx

A = np.arange(6.0, dtype=np.float32).reshape(3, 2)
b = jnp.ones(3)
LIKE = jnp.zeros(2)
SOLVERS = [cx.LSMR(), cx.CG(), cx.Cholesky(), cx.QR()]


def matvec(v, matrix=A):
    return matrix @ v


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("where", ["b", "A", "damp"])
def test_non_finite_input_ends_the_loop_at_once(solver, bad, where):
    right = b.at[1].set(bad) if where == "b" else b
    matrix = jnp.asarray(A).at[0, 0].set(bad) if where == "A" else jnp.asarray(A)
    damp = jnp.float32(bad) if where == "damp" else 0.0
    _, info = cx.lstsq(matvec, right, matrix, like=LIKE, damp=damp, solver=solver)
    assert not info.converged
    assert info.iterations <= 1
    assert info.reason in (cx.Reason.NOT_FINITE, cx.Reason.RANK)
    if isinstance(solver, cx.LSMR | cx.CG):
        assert info.reason == cx.Reason.NOT_FINITE
        assert "not finite" in info.explain()


def test_overflow_ends_the_loop_and_keeps_the_last_finite_iterate():
    def explodes(v):
        # Finite at first; once v has turned towards the second unit vector, it overflows.
        return jnp.array([v[0], 1e30 * (1e30 * v[1])])

    x, info = cx.lstsq(explodes, jnp.array([1.0, 1e-20]), like=LIKE)
    assert not info.converged
    assert info.reason == cx.Reason.NOT_FINITE
    assert info.iterations <= 2
    assert bool(jnp.all(jnp.isfinite(x)))


def test_cg_reports_an_overflow_of_its_squares():
    scaled = np.diag(np.geomspace(1e17, 1e20, 6)).astype(np.float32)
    _, info = cx.lstsq(lambda v: scaled @ v, jnp.ones(6), like=jnp.zeros(6), solver=cx.CG())
    assert not info.converged
    assert info.reason == cx.Reason.NOT_FINITE


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((matvec, b), {}, TypeError, "needs `like=`"),
        ((A, b), {"like": LIKE}, TypeError, "`matvec` must be a function.*lambda v, A: A @ v"),
        ((matvec, b), {"like": jnp.zeros(3)}, TypeError, r"vector like `like`, float32\[3\]"),
        ((matvec, jnp.ones(4)), {"like": LIKE}, ValueError, r"`b` does not fit.*\[4\].*\[3\]"),
        ((matvec, (b, b)), {"like": LIKE}, ValueError, "`b` does not fit"),
        ((matvec, jnp.ones(3, int)), {"like": LIKE}, TypeError, "`b`.*int32.*Cast"),
        ((matvec, b), {"like": jnp.zeros(2, int)}, TypeError, "`like`.*int32"),
        ((matvec, b), {"like": jnp.zeros(2, complex)}, TypeError, "`like`.*complex64"),
        ((matvec, b), {"like": ()}, ValueError, "`like` has no arrays"),
        ((matvec, b), {"like": LIKE, "damp": jnp.ones(2)}, TypeError, "`damp`.*shape"),
        ((matvec, b), {"like": LIKE, "damp": float("nan")}, ValueError, "`damp` must be finite"),
        ((matvec, b), {"like": LIKE, "x0": jnp.zeros(3)}, ValueError, "`x0` does not fit"),
        ((matvec, b), {"like": LIKE, "preconditioner": b}, ValueError, "`preconditioner`"),
        ((matvec, b), {"like": {"v": LIKE, "step": 3}}, TypeError, r"`like\['step'\]`.*int32"),
        ((matvec, b), {"like": LIKE, "x0": jnp.arange(2)}, TypeError, "`x0`.*int32"),
        ((matvec, b), {"like": LIKE, "preconditioner": LIKE.astype(int)}, TypeError, "`precond"),
        ((matvec, b), {"like": LIKE, "reference": jnp.ones(2)}, TypeError, "`reference`.*shape"),
        ((matvec, b), {"like": LIKE, "reference": "b"}, TypeError, "`reference`.*'b'"),
        ((matvec, b), {"like": LIKE, "solver": cx.LSMR}, TypeError, "instance.*the class LSMR"),
        ((matvec, b), {"like": LIKE, "solver": "lsmr"}, TypeError, "`solver`.*'lsmr'"),
    ],
)
def test_wrong_arguments_are_named_in_the_error(arguments, options, error, message):
    with pytest.raises(error, match=message):
        cx.lstsq(*arguments, **options)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: cx.LSMR(rtol=-1e-6), ValueError, r"LSMR\(rtol=...\).*at least 0, got -1e-06"),
        (lambda: cx.LSMR(rtol=float("nan")), ValueError, "rtol"),
        (lambda: cx.LSMR(rtol="1e-6"), TypeError, "Python number"),
        (lambda: cx.LSMR(rtol=jnp.float32(1e-6)), TypeError, "cannot be traced"),
        (lambda: cx.LSMR(condition_limit=0.5), ValueError, "condition_limit"),
        (lambda: cx.LSMR(max_iterations=0), ValueError, "max_iterations"),
        (lambda: cx.LSMR(max_iterations=1.5), TypeError, "integer"),
        (lambda: cx.CG(rtol=-1.0), ValueError, r"CG\(rtol"),
    ],
)
def test_wrong_solver_settings_are_named_in_the_error(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_explain_needs_one_finished_solve():
    info = jax.vmap(lambda b: cx.lstsq(matvec, b, like=LIKE)[1])(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="pick a lane"):
        info.explain()
    assert jax.tree.map(lambda leaf: leaf[0], info).explain().startswith("converged")


def test_a_linearised_function_is_linear_also_inside_of_jit():
    """`jax.linearize` puts zeros beside the tangents, whose values are not known while tracing."""
    A = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)

    def function(x):
        y = A @ x
        return jnp.where(y > 0, y**2, 0.1)

    @jax.jit
    def step(x):
        values, linear = jax.linearize(function, x)
        return cx.lstsq(linear, values, like=x)

    x = jnp.array([1.0, -2.0, 0.5])
    found, info = step(x)
    J = jax.jacobian(function)(x)
    np.testing.assert_allclose(found, np.linalg.pinv(J) @ function(x), rtol=1e-4)
    assert info.converged


def test_an_affine_function_inside_of_jit_never_converges():
    """What is put beside the linear part is not known while tracing, so numbers must tell."""
    A = jnp.eye(3)

    @jax.jit
    def solve(shift):
        return cx.lstsq(lambda v: jnp.concatenate([A @ v, shift]), jnp.ones(5), like=jnp.ones(3))

    assert not solve(jnp.ones(2))[1].converged
    assert solve(jnp.zeros(2))[1].converged


@pytest.mark.parametrize(
    "solve",
    [
        lambda: cx.lstsq(lambda v: A @ v + 1, b, like=LIKE),
        lambda: cx.lstsq(matvec, b, like=LIKE, damp=float("nan")),
        lambda: cx.lstsq(matvec, b, like=LIKE, solver=cx.LSMR),
        lambda: cx.LSMR(max_iterations=0),
    ],
    ids=["not linear", "damp", "solver", "iterations"],
)
def test_mistakes_in_arguments_are_user_errors(solve):
    with pytest.raises(cx.UserError):
        solve()
