"""A matvec that is not linear is an error; one that is linear is accepted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.sparse.linalg import cg

import constrainx as cx
from tests.linalg import dense

A = np.arange(6.0, dtype=np.float32).reshape(3, 2)
S = np.array([[3.0, 1.0], [1.0, 2.0]], np.float32)
b = jnp.ones(3)
MASK = jnp.array([True, False, True])
LIKE = jnp.zeros(2)

NON_LINEAR = {
    "sin": lambda v: jnp.sin(A @ v),
    "square": lambda v: (A @ v) ** 2,
    "product": lambda v: (A @ v) * v[0],
    "max": lambda v: jnp.maximum(A @ v, 0.0),
    "where": lambda v: jnp.where(A @ v > 0, A @ v, 0.0),
    "relu": lambda v: jax.nn.relu(A @ v),
    "norm": lambda v: jnp.linalg.norm(v) * jnp.ones(3),
    "astype": lambda v: (A @ v).astype(int).astype(jnp.float32),
    "floor": lambda v: jnp.floor(A @ v),
    "sign": lambda v: A @ jnp.sign(v),
    "comparison": lambda v: A @ (v * (v > 0)),
    "stop_gradient": lambda v: A @ jax.lax.stop_gradient(v),
    "index": lambda v: jnp.asarray(A)[:, jnp.argmax(v)],
    "sort": lambda v: A @ jnp.sort(v),
    "cond": lambda v: jax.lax.cond(v[0] > 0, lambda w: A @ w, lambda w: 2 * (A @ w), v),
    "scan": lambda v: jax.lax.scan(lambda c, row: (c * jnp.sin(c), c * row[0]), v[0], A)[1],
    "while": lambda v: A @ jax.lax.while_loop(lambda w: w[0] < 5.0, lambda w: 2 * w, v),
    "moving-matrix": lambda v: A @ jnp.linalg.solve(S + jnp.outer(v, v), v),
}
AFFINE = {
    "literal": lambda v: A @ v + 1.0,
    "array": lambda v: A @ v - jnp.arange(3.0),
    "jit": lambda v: jax.jit(lambda w: A @ w + b)(v),
    "nested": lambda v: jax.checkpoint(lambda w: jax.jit(lambda u: u + b)(A @ w))(v),
    "scaled": lambda v: 2.0 * (A @ (v + 1.0)) / 3.0,
    "where": lambda v: jnp.where(MASK, A @ v, 1.0),
    "concatenate": lambda v: jnp.concatenate([v, jnp.ones(1)]),
    "stack": lambda v: jnp.stack([v[0], v[1], 1.0]),
    "pad": lambda v: jnp.pad(v, (0, 1), constant_values=1.0),
    "set": lambda v: (A @ v).at[0].set(1.0),
    "set-into": lambda v: jnp.ones(3).at[:2].set(v),
    "update": lambda v: jax.lax.dynamic_update_slice(jnp.ones(3), v, (0,)),
    "scan-carry": lambda v: jax.lax.scan(lambda c, row: (c + row @ v, c), 1.0, A)[1],
    "scan-body": lambda v: jax.lax.scan(lambda c, row: (c, row @ v + 1.0), 0.0, A)[1],
    "late-carry": lambda v: jax.lax.scan(
        lambda carry, _: ((carry[1], 0.0 * carry[1] + 1.0), carry[0]), (v[0], v[1]), length=3
    )[1],
    "cond": lambda v: jax.lax.cond(MASK[0], lambda w: A @ w, lambda w: b, v),
    "map": lambda v: jax.lax.map(lambda row: row @ v + 1.0, A),
    "constant": lambda v: b,
    "a-leaf": lambda v: {"x": (A @ v)[:2], "y": b[:1]},
    "solve": lambda v: A @ jnp.linalg.solve(S, v + 1.0),
}  # fmt: skip


@jax.custom_vjp
def doubled(v):
    return jax.pure_callback(lambda v: 2 * v, v, v, vmap_method="sequential")


doubled.defvjp(lambda v: (doubled(v), None), lambda _, g: (2 * g,))


@jax.custom_vjp
def scaled(v, scale):
    return scale * v


scaled.defvjp(lambda v, s: (s * v, (v, s)), lambda kept, g: (kept[1] * g, jnp.vdot(kept[0], g)))


@jax.custom_jvp
def tripled(v):
    return 3 * v


tripled.defjvp(lambda primals, tangents: (tripled(*primals), 3 * tangents[0]))

LINEAR = {
    "zeros": (lambda v: jnp.zeros(3) + A @ v, A),
    "sum": (lambda v: sum((A[:, i] * v[i] for i in range(2)), start=0.0), A),
    "jit": (lambda v: jax.jit(lambda w: A @ w + 0.0)(v), A),
    "jvp": (lambda v: jax.jvp(lambda p: jnp.tanh(A @ p), (jnp.zeros(2),), (v,))[1], A),
    "pad": (lambda v: jnp.concatenate([v, jnp.zeros(1)]), np.eye(3, 2)),
    "where": (lambda v: jnp.where(MASK, A @ v, 0.0), A * np.asarray(MASK)[:, None]),
    "set": (lambda v: (A @ v).at[0].set(0.0), A * [[0], [1], [1]]),
    "scan": (lambda v: jax.lax.scan(lambda c, row: (c, row @ v), 0.0, A)[1], A),
    "carry": (lambda v: jax.lax.scan(lambda c, r: (c + r @ v, c + r @ v), 0.0, A)[1], A.cumsum(0)),
    "scatter": (lambda v: jnp.zeros(3).at[:2].add(v), np.eye(3, 2)),
    "cond": (lambda v: jax.lax.cond(A[0, 1] > 0, lambda w: A @ w, lambda w: 2 * (A @ w), v), A),
    "gather": (lambda v: v[jnp.array([1, 0, 1])], np.array([[0, 1], [1, 0], [0, 1]])),
    "fft": (lambda v: jnp.fft.irfft(jnp.fft.rfft(A @ v), 3), A),
    "zero": (lambda v: 0.0 * (A @ v), 0 * A),
    "solve": (lambda v: A @ jnp.linalg.solve(S, v), A @ np.linalg.inv(S)),
    "cg": (lambda v: A @ cg(lambda w: S @ w, v, tol=1e-7)[0], A @ np.linalg.inv(S)),
    "custom_vjp": (lambda v: A @ scaled(v, 2.0), 2 * A),
    "custom_jvp": (lambda v: A @ tripled(v), 3 * A),
    "callback": (lambda v: A @ doubled(v), 2 * A),
    "lstsq": (lambda v: A @ cx.lstsq(lambda w: S @ w, v, like=v)[0], A @ np.linalg.inv(S)),
}


def right_hand_side(function):
    return jax.tree.map(lambda leaf: jnp.ones(leaf.shape), jax.eval_shape(function, LIKE))


@pytest.mark.parametrize("name", NON_LINEAR)
def test_a_non_linear_matvec_is_an_error(name):
    with pytest.raises(TypeError, match=r"not linear in its first argument.*jax\.jvp"):
        jax.eval_shape(lambda b: cx.lstsq(NON_LINEAR[name], b, like=LIKE), b)


@pytest.mark.parametrize("name", AFFINE)
def test_an_affine_matvec_is_an_error(name):
    right = right_hand_side(AFFINE[name])
    with pytest.raises(TypeError, match="adds a constant"):
        jax.eval_shape(lambda b: cx.lstsq(AFFINE[name], b, like=LIKE), right)


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_matvec_is_accepted_however_it_is_written(name):
    function, matrix = LINEAR[name]
    right = jnp.arange(1.0, 4.0)
    x, info = jax.jit(lambda b: cx.lstsq(function, b, like=LIKE))(right)
    assert info.converged, cx.Reason(int(info.reason)).sentence
    np.testing.assert_allclose(x, dense.solve(matrix, right, rcond=1e-6), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cg", "custom_vjp", "custom_jvp", "callback"])
def test_a_matvec_with_a_rule_of_its_own_has_gradients(name):
    function, matrix = LINEAR[name]
    gradient = jax.grad(lambda b: jnp.sum(cx.lstsq(function, b, like=LIKE)[0]))(b)
    np.testing.assert_allclose(gradient, np.linalg.pinv(matrix).sum(0), rtol=1e-4, atol=1e-5)


def test_gradients_reach_an_argument_of_a_custom_vjp():
    """x is proportional to 1/scale."""

    def total(scale):
        return jnp.sum(cx.lstsq(lambda v: A @ scaled(v, scale), jnp.arange(3.0) ** 2, like=LIKE)[0])

    np.testing.assert_allclose(jax.grad(total)(2.0), -total(2.0) / 2.0, rtol=1e-4)


def callback(function):
    """A function that hides what it does, with the derivative of A @ v."""

    @jax.custom_vjp
    def hidden(v):
        shape = jax.ShapeDtypeStruct((3,), v.dtype)
        return jax.pure_callback(function, shape, v, vmap_method="sequential")

    hidden.defvjp(lambda v: (hidden(v), None), lambda _, g: (A.T @ g,))
    return hidden


@pytest.mark.parametrize(
    "function",
    [lambda v: A @ v + np.float32(0.01), lambda v: np.round(A @ v), lambda v: A[::-1] @ v],
    ids=["affine", "steps", "another-derivative"],
)
def test_a_matvec_that_hides_what_it_does_is_tested_at_run_time(function):
    hidden = callback(function)
    with pytest.raises(TypeError, match="not linear in its first argument"):
        cx.lstsq(hidden, b, like=LIKE)
    _, info = jax.jit(lambda b: cx.lstsq(hidden, b, like=LIKE))(b)
    assert not info.converged
    assert info.reason == cx.Reason.NOT_LINEAR
    assert "not linear" in info.explain()
    _, info = jax.jit(jax.vmap(lambda b: cx.lstsq(hidden, b, like=LIKE)))(jnp.stack([b, 2 * b]))
    assert not info.converged.any()


def test_a_matvec_known_to_be_linear_is_not_tested_at_run_time():
    def solve(b):
        return cx.lstsq(lambda v: A @ v, b, like=LIKE)[0]

    assert "random" not in str(jax.make_jaxpr(solve)(b))
