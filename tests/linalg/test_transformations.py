"""`jit` and `vmap`, over every input, alone and mixed with differentiation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import constrainx as cx
from tests.linalg import dense

TIGHT = cx.LSMR(rtol=1e-13, condition_limit=1e15)


def batch_of_problems(case=dense.CASES[0], lanes=3):
    problems = [case.problem(seed) for seed in range(lanes)]
    A = jnp.asarray(np.stack([p[0] for p in problems]))
    b = jnp.asarray(np.stack([p[3] for p in problems]))
    return A, b


def solve(A, b, damp, solver=TIGHT):
    return cx.lstsq(lambda v, A: A @ v, b, A, like=jnp.zeros(A.shape[1]), damp=damp, solver=solver)


@functools.cache
def batched(axes):
    return jax.jit(jax.vmap(solve, in_axes=axes))


@pytest.mark.parametrize("axes", [(None, 0, None), (0, None, None), (None, None, 0), (0, 0, 0)])
@pytest.mark.parametrize("case", dense.CASES[:6], ids=str)
def test_vmap_over_each_input(x64, axes, case):
    A, b = batch_of_problems(case)
    damp = jnp.array([0.0, 0.3, 1.0])
    arguments = [
        value if axis == 0 else value[0] for value, axis in zip((A, b, damp), axes, strict=True)
    ]
    x, info = batched(axes)(*arguments)
    assert info.converged.shape == (3,)
    for lane in range(3):
        one = [
            value[lane if axis == 0 else 0] for value, axis in zip((A, b, damp), axes, strict=True)
        ]
        np.testing.assert_allclose(x[lane], dense.solve(*one), rtol=1e-9, atol=1e-9)


def test_a_converged_lane_stays_as_it_is(x64):
    """The lane is bit for bit what it is alone, however long another lane takes."""
    easy, hard = jnp.eye(6), jnp.asarray(dense.matrix(6, 6, condition=1e5))
    b = jnp.asarray(np.random.default_rng(0).normal(size=6))
    solver = cx.LSMR(rtol=1e-10, condition_limit=1e15)
    run = jax.jit(jax.vmap(lambda A: solve(A, b, 0.0, solver)))
    x, info = run(jnp.stack([easy, hard]))
    x_alone, info_alone = run(jnp.stack([easy, easy]))
    assert info.iterations[0] == info_alone.iterations[0] < info.iterations[1]
    np.testing.assert_array_equal(x[0], x_alone[0])
    np.testing.assert_array_equal(info.residual_norm[0], info_alone.residual_norm[0])


def test_a_lane_that_is_not_finite_does_not_spoil_the_others(x64):
    A, b = batch_of_problems()
    b = b.at[1, 2].set(jnp.nan)
    x, info = jax.vmap(solve, in_axes=(0, 0, None))(A, b, 0.0)
    np.testing.assert_array_equal(info.converged, [True, False, True])
    assert info.reason[1] == cx.Reason.NOT_FINITE
    assert bool(jnp.all(jnp.isfinite(x)))
    np.testing.assert_allclose(x[2], dense.solve(A[2], b[2]), rtol=1e-9)


def loss(A, b, damp):
    # CG compiles faster, and the derivative rule does not depend on the solver.
    return jnp.sum(jnp.sin(solve(A, b, damp, cx.CG(rtol=1e-13))[0]))


# Both batches of a shape share it.
gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, 0)])
@pytest.mark.parametrize("index", [0, 2], ids=["tall", "wide"])
def test_gradients_of_a_batch_are_batches_of_gradients(x64, axes, index):
    A, b = batch_of_problems(dense.CASES[index])
    damp = jnp.array([0.2, 0.5, 1.0])
    arguments = [
        value if axis == 0 else value[0] for value, axis in zip((A, b, damp), axes, strict=True)
    ]

    def total(*arguments):
        return jnp.sum(jax.vmap(loss, in_axes=axes)(*arguments))

    inside = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*arguments)
    outside = jax.jit(jax.vmap(gradient, in_axes=axes))(*arguments)
    for position, axis in enumerate(axes):
        expected = outside[position] if axis == 0 else outside[position].sum(axis=0)
        np.testing.assert_allclose(inside[position], expected, rtol=1e-8, atol=1e-10)
        lane = [value[1 if a == 0 else 0] for value, a in zip((A, b, damp), axes, strict=True)]
        np.testing.assert_allclose(
            outside[position][1], gradient(*lane)[position], rtol=1e-8, atol=1e-10
        )


def test_nested_vmap_and_forward_mode(x64):
    A, b = batch_of_problems()
    grid = jax.vmap(
        jax.vmap(lambda A, b: solve(A, b, 0.0)[0], in_axes=(None, 0)), in_axes=(0, None)
    )
    x, tangent = jax.jvp(grid, (A, b), (A, 0 * b))
    for i in range(3):
        for j in range(3):
            np.testing.assert_allclose(x[i, j], dense.solve(A[i], b[j]), rtol=1e-9)
    np.testing.assert_allclose(tangent, -x, rtol=1e-7)  # the solution of (1 + t) A x = b


def test_vmap_over_axes_other_than_the_first(x64):
    A, b = batch_of_problems()
    x = jax.vmap(lambda A, b: solve(A, b, 0.0)[0], in_axes=(2, 1), out_axes=1)(
        jnp.moveaxis(A, 0, 2), b.T
    )
    np.testing.assert_allclose(x[:, 1], dense.solve(A[1], b[1]), rtol=1e-9)
    gradient = jax.grad(
        lambda b: jnp.sum(jax.vmap(lambda A, b: solve(A, b, 0.0)[0], in_axes=(2, 1))(
            jnp.moveaxis(A, 0, 2), b
        ))
    )(b.T)  # fmt: skip
    np.testing.assert_allclose(gradient[:, 1], np.linalg.pinv(A[1]).T @ np.ones(5), rtol=1e-8)


def test_lstsq_inside_scan_and_checkpoint(x64):
    A, b = batch_of_problems()

    @jax.checkpoint
    def step(carry, A):
        return 0.5 * carry + solve(A, b[0], 0.1)[0], None

    def rolled(A):
        return jnp.sum(jax.lax.scan(step, jnp.zeros(5), A)[0])

    def unrolled(A):
        carry = jnp.zeros(5)
        for lane in A:
            carry, _ = step(carry, lane)
        return jnp.sum(carry)

    np.testing.assert_allclose(jax.grad(rolled)(A), jax.grad(unrolled)(A), rtol=1e-8, atol=1e-12)


def test_linearize_and_transpose_of_a_solve(x64):
    A, b = batch_of_problems()
    _, pushforward = jax.linearize(lambda b: solve(A[0], b, 0.0)[0], b[0])
    np.testing.assert_allclose(pushforward(b[1]), dense.solve(A[0], b[1]), rtol=1e-9)
    # The linear map that came out can be differentiated and batched like any other.
    np.testing.assert_allclose(jax.jacobian(pushforward)(b[1]), np.linalg.pinv(A[0]), rtol=1e-8)
