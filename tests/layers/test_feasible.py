"""`Feasible`: the nearest output that satisfies the constraints, and its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.optimize import nnls

import constrainx as cx
from constrainx.layers._active import solve_bounded_dense

RNG = np.random.default_rng(0)
EXAMPLES = 24


class Given(nnx.Module):
    """Returns its second argument."""

    def __call__(self, x, y):
        return y


def solve_by_nnls(y, A, b, G, h):
    """The point of {A z = b, G z ≤ h} nearest to y, as a problem of least distance.

    Lawson and Hanson, "Solving least squares problems", chapter 23.
    """
    rows = np.concatenate([A, -A, -G])
    right = np.concatenate([b - A @ y, A @ y - b, G @ y - h])
    matrix = np.concatenate([rows.T, right[None]])
    unit = np.eye(len(matrix))[-1]
    residual = matrix @ nnls(matrix, unit, maxiter=10_000)[0] - unit
    return y - residual[:-1] / residual[-1]


def make_polyhedra(n, equalities, inequalities, *, dependent=False):
    """Matrices, and for each example right-hand sides that have a common point."""
    A, G = RNG.normal(size=(equalities, n)), RNG.normal(size=(inequalities, n))
    if dependent:
        A[-1], G[-1] = A[0] + A[1], 2 * G[0]
    inside = RNG.normal(size=(EXAMPLES, n))
    b = inside @ A.T
    h = inside @ G.T + 0.3 * RNG.exponential(size=(EXAMPLES, inequalities))
    if dependent:
        h[:, -1] = 2 * h[:, 0]
    return A, b, G, h, inside + 3 * RNG.normal(size=(EXAMPLES, n))


def constrain_affinely(A, G):
    A, G = jnp.asarray(A), jnp.asarray(G)
    return [
        cx.OutputEquals(0.0, of=lambda x, y: A @ y - x["b"]),
        cx.OutputAtMost(0.0, of=lambda x, y: G @ y - x["h"]),
    ]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("sizes", "dependent", "solver"),
    [
        pytest.param((6, 2, 5), False, None, id="usual"),
        pytest.param((5, 2, 30), False, None, id="more inequalities than dimensions"),
        pytest.param((6, 4, 6), True, None, id="dependent rows"),
        pytest.param((6, 4, 6), True, cx.LSMR(rtol=1e-14), id="dependent rows, LSMR"),
        pytest.param((6, 2, 5), False, cx.QR(), id="QR"),
    ],
)
def test_affine_constraints_give_the_projection(sizes, dependent, solver):
    A, b, G, h, y = make_polyhedra(*sizes, dependent=dependent)
    model = cx.Feasible(Given(), constrain_affinely(A, G), solver=solver)
    found = model.check({"b": jnp.asarray(b), "h": jnp.asarray(h)}, jnp.asarray(y))
    wanted = [solve_by_nnls(y[i], A, b[i], G, h[i]) for i in range(EXAMPLES)]
    np.testing.assert_allclose(found.output, wanted, atol=1e-9)
    assert found.met.all()
    assert found.nearest.all()
    np.testing.assert_allclose(found.moved, np.linalg.norm(wanted - y, axis=1), rtol=1e-8)
    # Both kinds of inequalities were there.
    active = np.abs(np.asarray(found.output) @ G.T - h) < 1e-8
    assert active.any(axis=0).sum() > 1
    assert not active.all()


@pytest.mark.parametrize("rows", [3, 12])
def test_float32_meets_the_default_tolerance(rows):
    A, b, G, h, y = make_polyhedra(10, 4, rows)
    constraints = constrain_affinely(A.astype(np.float32), G.astype(np.float32))
    right = {"b": jnp.asarray(b, jnp.float32), "h": jnp.asarray(h, jnp.float32)}
    found = cx.Feasible(Given(), constraints).check(right, jnp.asarray(y, jnp.float32))
    assert found.output.dtype == jnp.float32
    assert found.met.all()
    assert np.abs(np.asarray(found.output, np.float64) @ A.T - b).max() < 1e-5
    assert (np.asarray(found.output, np.float64) @ G.T - h).max() < 1e-5


@pytest.mark.usefixtures("x64")
def test_pivoting_one_by_one_ends_where_blocks_do_not():
    """Random rows in three dimensions, where exchanging blocks often fails."""
    rows = RNG.normal(size=(40, 25, 3))
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    right = np.einsum("brn,bn->br", rows, 4 * RNG.normal(size=(40, 3)))
    right -= RNG.exponential(size=(40, 25))
    gram = jnp.asarray(rows @ rows.transpose(0, 2, 1))
    found = jax.vmap(lambda G, e: solve_bounded_dense(G, e, damping=1e-14))(gram, right)
    multipliers = np.asarray(found.multipliers)
    left = right - np.einsum("brs,bs->br", gram, multipliers)
    assert np.asarray(found.iterations).max() > 10
    assert multipliers.min() >= 0
    assert left.max() < 1e-9
    assert np.abs(multipliers * left).max() < 1e-8


def rotate(x, y):
    """Equalities whose rows depend on the input."""
    matrix = jnp.array([[1.0, 0.5, 0.0, -0.3], [0.0, 1.0, 0.7, 0.2]])
    return jnp.stack([jnp.cos(x[0]) * matrix[0] + matrix[1] * x[1], matrix[1]]) @ y


PROBLEMS = {
    "rotated": [cx.OutputEquals(0.3, of=rotate)],
    "affine": [
        cx.OutputEquals(0.3, of=rotate),
        cx.OutputAtMost(0.6, of=lambda x, y: y * (1 + x[0] ** 2) - x[1] ** 2),
    ],
    "dependent": [
        cx.OutputEquals(0.3, of=lambda x, y: jnp.tile(rotate(x, y), 2)),
        cx.OutputAtMost(0.6, of=lambda x, y: jnp.tile(y, 2)),
    ],
    "ball": [cx.OutputAtMost(0.0, of=lambda x, y: jnp.sum(y**2) - 1 - x[0] ** 2)],
    "curved": [
        cx.OutputEquals(0.5, of=lambda x, y: y[0] * y[1] + 0.3 * jnp.sin(y[2]) - 0.1 * x[0]),
        cx.OutputAtMost(1.0, of=lambda x, y: jnp.exp(y[2:]) - 0.1 * x[1]),
    ],
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["affine", "dependent", "curved"])
def test_gradients_are_finite_differences(name):
    """By the input and by the model's output."""
    measure, point, along = make_measure(name)
    gradients = jax.jit(jax.value_and_grad(lambda *point: jnp.sum(measure(*point)[0]), (0, 1)))
    slope, smooth = difference(lambda *point: measure(*point)[0], point, along)
    _, gradient = gradients(*point)
    reverse = sum(jnp.sum(g * d, axis=1) for g, d in zip(gradient, along, strict=True))
    np.testing.assert_allclose(reverse[smooth], slope[smooth], rtol=1e-5, atol=1e-6)
    if name == "affine":
        forward = jax.jit(lambda: jax.jvp(lambda *p: measure(*p)[0], point, along)[1])()
        np.testing.assert_allclose(forward, reverse, rtol=1e-8, atol=1e-8)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["rotated", "ball"])
def test_second_derivatives_are_finite_differences(name):
    measure, point, along = make_measure(name)

    @jax.jit
    def differentiate(x, y):
        return jax.jvp(lambda *point: measure(*point)[0], (x, y), along)[1]

    slope, smooth = difference(differentiate, point, along)
    second = jax.jit(lambda: jax.jvp(differentiate, point, along)[1])()
    np.testing.assert_allclose(second[smooth], slope[smooth], rtol=1e-5, atol=1e-6)


def make_measure(name):
    """A function of input and output, one figure an example; a point, and a direction there."""
    model = cx.Feasible(Given(), PROBLEMS[name])
    rng = np.random.default_rng(1)
    x, y, dx, dy, weight = (jnp.asarray(rng.normal(size=(EXAMPLES, n))) for n in (2, 4, 2, 4, 4))

    def measure(x, y):
        found = model.check(x, y)
        return jnp.sum(weight * jnp.sin(found.output), axis=1), found.met & found.nearest

    # Near enough to zero for all problems to have a solution.
    x, y = 0.2 * x, 1.5 * y
    _, solved = jax.jit(measure)(x, y)
    assert solved.all()
    return measure, (x, y), (dx, dy)


def difference(function, point, along, step=1e-5):
    """Central differences, and where they mean something: no row becomes active near by."""
    function = jax.jit(function)
    above, now, below = (
        function(*(p + t * d for p, d in zip(point, along, strict=True)))
        for t in (step, 0.0, -step)
    )
    smooth = np.abs(above + below - 2 * now) < 1e-7
    assert smooth.sum() > 0.8 * EXAMPLES
    return (above - below) / (2 * step), smooth


@pytest.mark.usefixtures("x64")
def test_curved_constraints_end_at_a_nearest_point():
    """At a sphere the nearest point is known, from outside and from far inside."""
    sphere = cx.OutputEquals(4.0, of=lambda x, y: jnp.sum(y**2))
    y = jnp.asarray(RNG.normal(size=(EXAMPLES, 3))) * jnp.linspace(0.2, 4, EXAMPLES)[:, None]
    found = cx.Feasible(Given(), sphere).check(jnp.zeros((EXAMPLES, 1)), y)
    wanted = 2 * y / jnp.linalg.norm(y, axis=1, keepdims=True)
    np.testing.assert_allclose(found.output, wanted, atol=1e-9)
    assert found.nearest.all()
    assert found.iterations.max() < 15
