"""Derivatives against finite differences of a dense solution in float64."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import constrainx as cx
from tests.linalg import dense

TIGHT = cx.LSMR(rtol=1e-14, condition_limit=1e15)
CLOSE = cx.CG(rtol=1e-13)  # compiles faster, and the derivative rule does not depend on the solver
DAMPINGS = {
    "undamped": (0.0, False),
    "damped": (0.4, False),
    "slightly-damped": (1e-3, False),
    "traced": (0.4, True),
    "traced-zero": (0.0, True),
}


class Settings(NamedTuple):
    """What is known when a derivative is compiled; a damping of None is known only later."""

    damp: float | None
    solver: cx.LSMR | cx.CG | cx.Cholesky | cx.QR
    full_rank: bool


def loss(t, problem, settings):
    """A function of one number t that moves A, b and, if it is traced, the damping."""
    A, L, R, b, move_b, damp, move_damp, weights = problem
    moved = dense.moved(A, L, R, t)
    x, _ = cx.lstsq(
        lambda v, M: M @ v, b + t * move_b, moved, like=jnp.zeros(A.shape[1]),
        damp=damp + move_damp * t if settings.damp is None else settings.damp,
        solver=settings.solver, full_rank=settings.full_rank,
    )  # fmt: skip
    return jnp.sum(weights * jnp.sin(x))


def tangent(t, problem, settings):
    return jax.jvp(lambda t: loss(t, problem, settings), (t,), (1.0,))[1]


def tangent_of_gradient(t, problem, settings):
    return jax.jvp(lambda t: jax.grad(loss)(t, problem, settings), (t,), (1.0,))[1]


# Problems of one shape share what is compiled.
compiled = functools.partial(jax.jit, static_argnames="settings")
VALUE_AND_GRADIENT = compiled(jax.value_and_grad(loss))
TANGENT = compiled(tangent)
GRADIENT_OF_GRADIENT = compiled(jax.grad(jax.grad(loss)))
MIXED = {
    "forward-over-reverse": compiled(tangent_of_gradient),
    "reverse-over-forward": compiled(jax.grad(tangent)),
}


def scalar_problem(case, damp, traced, *, solver=TIGHT, full_rank=False):
    """The other arguments of `loss`, and the same function from the dense reference."""
    A, L, R, b = case.problem()
    rng = np.random.default_rng(7)
    weights = rng.normal(size=case.columns)
    move_b = (A if case.consistent else np.eye(case.rows)) @ rng.normal(
        size=case.columns if case.consistent else case.rows
    )
    move_damp = 0.3 if damp and traced else 0.0

    def reference(t):
        x = dense.solve(dense.moved(A, L, R, t), b + t * move_b, damp + move_damp * t)
        return np.sum(weights * np.sin(x))

    problem = (A, L, R, b, move_b, np.float64(damp), np.float64(move_damp), weights)
    return (problem, Settings(None if traced else damp, solver, full_rank)), reference


@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("case", dense.CASES, ids=str)
def test_forward_and_reverse_mode_match_finite_differences(x64, case, damping):
    problem, reference = scalar_problem(case, *DAMPINGS[damping])
    expected = dense.derivative(reference, 0.2)
    value, gradient = VALUE_AND_GRADIENT(0.2, *problem)
    np.testing.assert_allclose(value, reference(0.2), rtol=1e-9)
    # With damping 1e-3 and a null space that b does not respect, derivatives are of order 1e6.
    tolerance = 1e-4 if damping == "slightly-damped" and not case.full_rank else 1e-7
    np.testing.assert_allclose(gradient, expected, rtol=tolerance, atol=1e-8)
    np.testing.assert_allclose(TANGENT(0.2, *problem), expected, rtol=tolerance, atol=1e-8)


@pytest.mark.parametrize("damping", ["undamped", "traced"])
@pytest.mark.parametrize("case", [c for c in dense.CASES if c.rows > 1 < c.columns], ids=str)
def test_gradients_of_gradients_match_finite_differences(x64, case, damping):
    solver = TIGHT if damping == "undamped" else CLOSE
    problem, reference = scalar_problem(case, *DAMPINGS[damping], solver=solver)
    expected = dense.second_derivative(reference, 0.2)
    found = GRADIENT_OF_GRADIENT(0.2, *problem)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MIXED)
@pytest.mark.parametrize("damping", ["undamped", "traced-zero"])
@pytest.mark.parametrize("name", ["tall-deficient", "wide-deficient"])
def test_mixed_second_derivatives_match_finite_differences(x64, name, damping, mode):
    case = next(c for c in dense.CASES if c.name == name)
    solver = TIGHT if damping == "undamped" else CLOSE
    problem, reference = scalar_problem(case, *DAMPINGS[damping], solver=solver)
    expected = dense.second_derivative(reference, 0.2)
    np.testing.assert_allclose(MIXED[mode](0.2, *problem), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [c for c in dense.CASES if c.full_rank], ids=str)
@pytest.mark.parametrize("damping", ["undamped", "traced"])
def test_full_rank_does_not_change_the_derivative(x64, case, damping):
    problem, reference = scalar_problem(case, *DAMPINGS[damping], full_rank=True)
    expected = dense.derivative(reference, 0.2)
    _, gradient = VALUE_AND_GRADIENT(0.2, *problem)
    np.testing.assert_allclose(gradient, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("solver", [cx.CG(rtol=1e-13), cx.Cholesky(), cx.QR()], ids=str)
@pytest.mark.parametrize("case", [dense.CASES[0], dense.CASES[2]], ids=str)
@pytest.mark.parametrize("damping", ["undamped", "traced"])
def test_every_solver_has_the_same_derivatives(x64, solver, case, damping):
    problem, reference = scalar_problem(case, *DAMPINGS[damping], solver=solver, full_rank=True)
    expected = dense.derivative(reference, 0.2)
    _, gradient = VALUE_AND_GRADIENT(0.2, *problem)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)


@jax.jit
@functools.partial(jax.grad, argnums=(0, 1, 2))
def gradient_of_weighted(L, R, b, A, weights):
    left, right = jnp.eye(len(L)) + L, jnp.eye(len(R)) + R
    x, _ = cx.lstsq(lambda v: left @ (A @ (right @ v)), b, like=jnp.zeros(len(R)), solver=TIGHT)
    return weights @ x


@pytest.mark.parametrize("case", dense.CASES, ids=str)
def test_gradients_with_respect_to_every_entry(x64, case):
    """All of ∇b, and ∇A along all directions that keep the rank."""
    A, L, R, b = case.problem()
    weights = np.random.default_rng(3).normal(size=case.columns)

    def reference(L, R, b):
        return weights @ dense.solve((np.eye(len(L)) + L) @ A @ (np.eye(len(R)) + R), b)

    L, R = 0.2 * L, 0.2 * R
    arguments = (L, R, b)
    for position, result in enumerate(gradient_of_weighted(*arguments, A, weights)):
        expected = np.zeros_like(arguments[position])
        for index in np.ndindex(*expected.shape):
            direction = np.zeros_like(expected)
            direction[index] = 1.0

            def along(t, position=position, direction=direction):
                moved = list(arguments)
                moved[position] = moved[position] + t * direction
                return reference(*moved)

            expected[index] = dense.derivative(along, 0.0)
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("damp", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("shape", [(12, 6), (6, 12)])
@pytest.mark.parametrize("loss", ["in-row-space", "anywhere"])
def test_gradients_are_accurate_for_small_damping(damp, shape, loss):
    """In float32 with the default tolerance, where (g − Aᵀp)/λ² would be noise."""
    A = dense.matrix(*shape, condition=4.0)
    b = np.random.default_rng(0).normal(size=shape[0])
    direction = np.random.default_rng(1).normal(size=shape)

    def ours(t):
        moved = jnp.asarray(A, jnp.float32) + t * jnp.asarray(direction, jnp.float32)
        right = jnp.asarray(b, jnp.float32)
        x, _ = cx.lstsq(lambda v: moved @ v, right, like=jnp.zeros(shape[1]), damp=damp)
        return jnp.sum(x**2) if loss == "in-row-space" else jnp.sum(jnp.sin(x + 1))

    def reference(t):
        x = dense.solve(A + t * direction, b, damp)
        return np.sum(x**2) if loss == "in-row-space" else np.sum(np.sin(x + 1))

    expected = dense.derivative(reference, 0.0)
    np.testing.assert_allclose(jax.grad(ours)(0.0), expected, rtol=2e-4)
    np.testing.assert_allclose(jax.jvp(ours, (0.0,), (1.0,))[1], expected, rtol=2e-4)


def test_gradients_are_right_without_full_rank_where_matfree_is_wrong(x64):
    """A is rank-deficient, there is no damping, and b is outside the range of A."""
    lstsq = pytest.importorskip("matfree.lstsq")
    case = next(c for c in dense.CASES if c.name == "tall-deficient")
    problem, reference = scalar_problem(case, 0.0, False)
    A, L, R, b = case.problem()
    weights = np.random.default_rng(7).normal(size=case.columns)
    their_solver = lstsq.lsmr(atol=1e-14, btol=1e-14, ctol=1e-15)

    def theirs(t):
        moved = dense.moved(jnp.asarray(A), jnp.asarray(L), jnp.asarray(R), t)
        x, _ = their_solver(lambda u: moved.T @ u, jnp.asarray(b))
        return jnp.sum(weights * jnp.sin(x))

    def our_reference(t):
        return np.sum(weights * np.sin(dense.solve(dense.moved(A, L, R, t), b)))

    value, gradient = jax.jit(jax.value_and_grad(theirs))(0.2)
    np.testing.assert_allclose(value, our_reference(0.2), rtol=1e-8)
    assert abs(gradient - dense.derivative(our_reference, 0.2)) > 1e-2
    _, gradient = VALUE_AND_GRADIENT(0.2, *problem)
    np.testing.assert_allclose(gradient, dense.derivative(reference, 0.2), rtol=1e-6)


def test_gradients_reach_values_that_matvec_closes_over(x64):
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(9, 3)), rng.normal(size=9)

    def ridge(log_scale):
        features = jnp.tanh(inputs * jnp.exp(log_scale))
        x, _ = cx.lstsq(
            lambda v: features @ v, jnp.asarray(targets), like=jnp.zeros(3), solver=TIGHT
        )
        return jnp.sum(x**2)

    check_grads(ridge, (jnp.array([0.1, -0.2, 0.3]),), order=2, modes=("fwd", "rev"), rtol=1e-4)


def test_a_gauss_newton_step_of_a_network_is_differentiable(x64):
    """The step is differentiated with respect to the point at which it is taken."""
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.normal(size=(3, 2)))
    parameters = {"w": jnp.asarray(rng.normal(size=(2, 4))), "v": jnp.asarray(rng.normal(size=4))}

    def network(p):
        return jnp.tanh(inputs @ p["w"]) @ p["v"]

    def step_length(p):
        step, _ = cx.lstsq(
            lambda d: jax.jvp(network, (p,), (d,))[1], network(p), like=p, solver=TIGHT
        )
        return jnp.sum(step["w"] ** 2) + jnp.sum(step["v"])

    check_grads(step_length, (parameters,), order=1, modes=("fwd", "rev"), rtol=1e-5)


@pytest.mark.parametrize("damp", [0.0, 0.3])
@pytest.mark.parametrize("option", ["x0", "preconditioner"])
def test_start_and_preconditioner_do_not_change_the_derivative(x64, option, damp):
    case = dense.CASES[0]
    A, L, R, b = case.problem()
    weights = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2.0, size=case.columns))

    def ours(t):
        moved = dense.moved(jnp.asarray(A), jnp.asarray(L), jnp.asarray(R), t)
        x, _ = cx.lstsq(
            lambda v: moved @ v, b, like=weights, damp=damp, solver=TIGHT, **{option: weights}
        )
        return jnp.sum(jnp.sin(x))

    def reference(t):
        return np.sum(np.sin(dense.solve(dense.moved(A, L, R, t), b, damp)))

    expected = dense.derivative(reference, 0.2)
    np.testing.assert_allclose(jax.jit(jax.grad(ours))(0.2), expected, rtol=1e-7)


def test_info_is_a_constant_to_autodiff(x64):
    gradient = jax.grad(
        lambda b: cx.lstsq(lambda v: 2.0 * v, b, like=jnp.zeros(3))[1].residual_norm
    )(jnp.ones(3))
    np.testing.assert_array_equal(gradient, np.zeros(3))


@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
    deficiency=st.integers(0, 2),
    damping=st.sampled_from(sorted(DAMPINGS)),
)
def test_gradients_are_right_for_any_shape_and_rank(rows, columns, deficiency, damping):
    case = dense.Case("any", rows, columns, max(1, min(rows, columns) - deficiency))
    if damping == "slightly-damped":
        damping = "damped"
    with jax.enable_x64(True):
        problem, reference = scalar_problem(case, *DAMPINGS[damping])
        _, gradient = VALUE_AND_GRADIENT(0.1, *problem)
    np.testing.assert_allclose(gradient, dense.derivative(reference, 0.1), rtol=1e-5, atol=1e-6)
