"""Solutions against a dense reference in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

import constrainx as cx
from tests.linalg import dense

TIGHT = cx.LSMR(rtol=1e-14, condition_limit=1e15)
ITERATIVE = [TIGHT, cx.CG(rtol=1e-14)]
DIRECT = [cx.Cholesky(), cx.QR()]


def solve(A, b, **options):
    return cx.lstsq(
        lambda v, A: A @ v, jnp.asarray(b), jnp.asarray(A), like=jnp.zeros(A.shape[1]), **options
    )


@pytest.mark.parametrize("damp", [0.0, 1e-2])
@pytest.mark.parametrize("case", dense.CASES, ids=str)
@pytest.mark.parametrize("solver", ITERATIVE + DIRECT, ids=lambda s: type(s).__name__)
def test_solutions_agree_with_the_dense_one(x64, solver, case, damp):
    A, _, _, b = case.problem()
    needs_rank = type(solver) in (cx.Cholesky, cx.QR)
    x, info = solve(A, b, damp=damp, solver=solver)
    if needs_rank and not case.full_rank and damp == 0.0:
        assert not info.converged
        assert info.reason == cx.Reason.RANK
        return
    assert info.converged, info.explain()
    # Damping a deficient matrix by 1e-2 makes a condition number of 1e2, and a direct solver sees
    # its square where b is out of range.
    tolerance = 1e-8 if needs_rank and not case.full_rank else 1e-11
    np.testing.assert_allclose(x, dense.solve(A, b, damp), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("solver", ITERATIVE + DIRECT, ids=lambda s: type(s).__name__)
def test_damping_may_be_traced(x64, solver):
    A, _, _, b = dense.CASES[0].problem()
    run = jax.jit(lambda damp: solve(A, b, damp=damp, solver=solver)[0])
    for damp in (0.0, 0.5, -0.5):
        np.testing.assert_allclose(run(damp), dense.solve(A, b, damp), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", dense.CASES, ids=str)
@pytest.mark.parametrize("damp", [0.0, 0.5])
def test_a_start_leads_to_the_minimiser_nearest_to_it(x64, case, damp):
    A, _, _, b = case.problem()
    x0 = np.random.default_rng(5).normal(size=A.shape[1])
    x, info = solve(A, b, x0=jnp.asarray(x0), damp=damp, solver=TIGHT)
    nearest = x0 + dense.solve(A, b - A @ x0) if damp == 0.0 else dense.solve(A, b, damp)
    assert info.converged
    np.testing.assert_allclose(x, nearest, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("solver", [cx.LSMR(rtol=1e-8), cx.CG(rtol=1e-8)], ids=str)
@pytest.mark.parametrize("damp", [0.0, 0.1])
def test_a_good_start_saves_iterations(x64, solver, damp):
    A = dense.matrix(60, 40, condition=50.0)
    b = np.random.default_rng(0).normal(size=60)
    exact = dense.solve(A, b, damp)
    near = exact + 1e-6 * np.random.default_rng(1).normal(size=40)
    cold = solve(A, b, damp=damp, solver=solver)[1]
    warm = solve(A, b, damp=damp, solver=solver, x0=jnp.asarray(near))[1]
    assert cold.converged
    assert warm.converged
    assert warm.iterations < 0.6 * cold.iterations


@pytest.mark.parametrize("damp", [0.0, 0.5])
def test_a_preconditioner_does_not_change_a_unique_solution(x64, damp):
    scales = np.geomspace(1e-4, 1e4, 20)
    A = dense.matrix(30, 20, condition=3.0) * scales
    b = np.random.default_rng(0).normal(size=30)
    solver = cx.LSMR(rtol=1e-12, condition_limit=1e15, max_iterations=2000)
    plain = solve(A, b, damp=damp, solver=solver)[1]
    x, info = solve(A, b, damp=damp, solver=solver, preconditioner=jnp.asarray(1 / scales))
    np.testing.assert_allclose(x * scales, dense.solve(A, b, damp, rcond=0) * scales, rtol=1e-6)
    if damp == 0.0:  # with damping, it is damp / scales that is badly scaled
        assert info.iterations < 0.5 * plain.iterations


def test_a_preconditioner_chooses_among_minimisers(x64):
    A, _, _, b = dense.CASES[2].problem()
    weights = np.random.default_rng(0).uniform(0.5, 2.0, size=A.shape[1])
    x, _ = solve(A, b, solver=TIGHT, preconditioner=jnp.asarray(weights))
    np.testing.assert_allclose(x, weights * dense.solve(A * weights, b), rtol=1e-10)


@pytest.mark.parametrize("damp", [0.0, 0.5])
@pytest.mark.parametrize("start", [False, True])
def test_a_weight_of_zero_holds_an_entry_where_it_starts(x64, start, damp):
    A, _, _, b = dense.CASES[0].problem()
    weights, x0 = np.array([1.0, 0.0, 2.0, 0.5, 0.0]), np.arange(1.0, 6.0)
    options = {"x0": jnp.asarray(x0)} if start else {}
    x, info = solve(A, b, damp=damp, solver=TIGHT, preconditioner=jnp.asarray(weights), **options)
    held = np.where(weights == 0, x0 if start else 0.0, 0.0)
    expected = held.copy()
    expected[weights > 0] = dense.solve(A[:, weights > 0], b - A @ held, damp)
    assert info.converged
    np.testing.assert_allclose(x, expected, rtol=1e-10)


@pytest.mark.parametrize("solver", [*ITERATIVE, cx.LSMR()], ids=str)
@pytest.mark.parametrize("damp", [0.0, 0.5])
def test_zero_right_hand_side_and_zero_operator_give_zero(solver, damp):
    for A, b in [(np.eye(3, 5), np.zeros(3)), (np.zeros((3, 5)), np.ones(3))]:
        x, info = solve(A.astype(np.float32), b.astype(np.float32), solver=solver, damp=damp)
        np.testing.assert_array_equal(x, np.zeros(5))
        assert info.converged
        assert info.iterations == 0
        assert info.reason == cx.Reason.TRIVIAL


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("shape", [(60, 20), (20, 60)])
def test_ill_conditioned_problems_in_float32(condition, shape):
    A = dense.matrix(*shape, condition=condition).astype(np.float32)
    # Consistent, so that the error grows with the condition number and not with its square.
    b = (A.astype(np.float64) @ np.random.default_rng(0).normal(size=shape[1])).astype(np.float32)
    solver = cx.LSMR(rtol=0.0, condition_limit=float("inf"), max_iterations=3000)
    x, _ = solve(A, b, solver=solver)
    reference = dense.solve(A, b, rcond=0)
    error = np.linalg.norm(x - reference)
    assert error <= 10 * np.finfo(np.float32).eps * condition * np.linalg.norm(reference)
    residual = np.linalg.norm(A.astype(np.float64) @ np.asarray(x, np.float64) - b)
    assert residual <= 1e-5 * np.linalg.norm(b)


@pytest.mark.parametrize("condition", [1e6, 1e12])
def test_ill_conditioned_problems_in_float64(x64, condition):
    A = dense.matrix(40, 15, condition=condition)
    truth = np.random.default_rng(0).normal(size=15)
    b = A @ truth
    solver = cx.LSMR(rtol=0.0, condition_limit=float("inf"), max_iterations=2000)
    x, _ = solve(A, b, solver=solver)
    assert np.linalg.norm(x - truth) <= 1e-15 * condition * 10 * np.linalg.norm(truth)


@pytest.mark.parametrize("condition", [10.0, 100.0])
@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize("rtol", [1e-7, 0.0])
def test_cg_keeps_its_best_iterate(condition, consistent, rtol):
    """With a tolerance below what float32 can do, it stops where it gets no better."""
    A = dense.matrix(200, 100, condition=condition).astype(np.float32)
    rng = np.random.default_rng(0)
    b = (A @ rng.normal(size=100) if consistent else rng.normal(size=200)).astype(np.float32)
    x, info = solve(A, b, solver=cx.CG(rtol=rtol))
    assert info.converged, info.explain()
    assert info.iterations < 1000
    reference = dense.solve(A, b, rcond=0)
    assert np.linalg.norm(x - reference) <= 1e-5 * np.linalg.norm(reference)
    residual = b - A.astype(np.float64) @ np.asarray(x, np.float64)
    np.testing.assert_allclose(info.residual_norm, np.linalg.norm(residual), rtol=1e-3, atol=1e-5)


def test_cg_ends_early_with_its_last_iterate(x64):
    """‖r‖ falls with every iteration, ‖Aᵀr‖ does not."""
    A = dense.matrix(60, 40, condition=1e4)
    b = np.random.default_rng(0).normal(size=60)
    norms = [
        solve(A, b, solver=cx.CG(rtol=1e-12, max_iterations=k))[1].residual_norm for k in (5, 6, 7)
    ]
    assert norms[0] > norms[1] > norms[2]


@pytest.mark.parametrize("shape", [(60, 20), (20, 60)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cholesky_reports_a_solution_that_is_far_off(x64, shape, dtype):
    """The error is about ε cond(A)²; above one per cent, the solve has not converged."""
    eps = np.finfo(dtype).eps
    for relative in (1e-5, 1e-3, 1e-1, 1.0, 10.0):
        for seed in range(4):
            A = dense.matrix(*shape, condition=np.sqrt(relative / eps), seed=seed).astype(dtype)
            b = np.random.default_rng(seed).normal(size=shape[0]).astype(dtype)
            x, info = cx.lstsq(
                lambda v, A: A @ v, jnp.asarray(b), jnp.asarray(A), solver=cx.Cholesky(),
                like=jax.ShapeDtypeStruct(shape[1:], dtype),
            )  # fmt: skip
            reference = dense.solve(A, b, rcond=0)
            error = np.linalg.norm(x - reference) / np.linalg.norm(reference)
            assert error < 0.01 or not info.converged
            assert info.converged or relative >= 0.1
            if not info.converged:
                assert info.reason in (cx.Reason.CONDITION, cx.Reason.RANK)


@pytest.mark.parametrize("solver", DIRECT, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (12, 12)])
def test_a_direct_solver_that_converged_is_right(solver, shape):
    """Where one singular value is lost to rounding, x and its residual both look as they should."""
    matrices, sides = [], []
    for condition in (1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7):
        for seed in range(20):
            rng = np.random.default_rng(seed)
            rank = min(shape)
            U, V = (np.linalg.qr(rng.normal(size=(size, rank)))[0] for size in shape)
            values = np.append(np.ones(rank - 1), 1 / condition)
            matrices.append((U * values) @ V.T)
            outside = rng.normal(size=shape[0])
            sides.append(outside if seed % 2 else matrices[-1] @ rng.normal(size=shape[1]))
    A, b = np.float32(matrices), np.float32(sides)
    found, info = jax.jit(jax.vmap(lambda A, b: solve(A, b, solver=solver)))(A, b)
    exact = np.array([dense.solve(*case, rcond=0) for case in zip(A, b, strict=True)])
    error = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert error[info.converged].max() < 0.01
    assert info.converged[:40].all()  # condition numbers of 10 and 100


@pytest.mark.parametrize("shape", [(24, 12), (12, 24), (12, 12)])
@pytest.mark.parametrize("rank", [8, 12])
def test_qr_reports_a_damping_that_rounding_hides(shape, rank):
    """Without full rank the error is about ε/λ²; with it, every damping is fine."""
    A = dense.matrix(*shape, rank=rank).astype(np.float32)
    b = np.random.default_rng(1).normal(size=shape[0]).astype(np.float32)
    for damp in (1.0, 1e-2, 1e-4, 1e-5, 1e-6, 1e-8):
        x, info = cx.lstsq(
            lambda v, A: A @ v, jnp.asarray(b), jnp.asarray(A),
            like=jnp.zeros(shape[1]), damp=jnp.float32(damp), solver=cx.QR(),
        )  # fmt: skip
        reference = dense.solve(A, b, damp, rcond=1e-5)
        error = np.linalg.norm(x - reference) / np.linalg.norm(reference)
        assert error < 0.01 or not info.converged, damp
        assert info.converged or (rank == 8 and damp <= 1e-4), damp


@pytest.mark.parametrize("solver", ITERATIVE + DIRECT, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
@pytest.mark.parametrize("damp", [0.0, 0.5])
def test_problems_without_rows_or_columns_are_solved(solver, shape, damp):
    A, b = np.zeros(shape, np.float32), np.ones(shape[0], np.float32)

    def total(A, b):
        x, info = solve(A, b, damp=damp, solver=solver)
        return jnp.sum(x), (x, info)

    (_, (x, info)), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(A, b)
    np.testing.assert_array_equal(x, np.zeros(shape[1]))
    assert info.converged
    assert info.reason == cx.Reason.TRIVIAL
    np.testing.assert_allclose(info.residual_norm, np.sqrt(shape[0]), rtol=1e-6)
    assert [gradient.shape for gradient in gradients] == [shape, shape[:1]]


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_the_scale_of_a_problem_does_not_matter(scale):
    A = dense.matrix(12, 8).astype(np.float32)
    b = np.random.default_rng(0).normal(size=12).astype(np.float32)
    reference, info = solve(A, b)
    for scaled_A, scaled_b, scaled_x in [(scale, 1.0, 1 / scale), (1.0, scale, scale)]:
        x, scaled_info = solve(np.float32(scaled_A) * A, np.float32(scaled_b) * b)
        assert scaled_info.converged, scaled_info.explain()
        assert abs(int(scaled_info.iterations) - int(info.iterations)) <= 1
        np.testing.assert_allclose(x / np.float32(scaled_x), reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("damp", [0.0, 0.5])
def test_one_row_or_column_at_any_scale(shape, scale, damp):
    rng = np.random.default_rng(0)
    A, b = rng.normal(size=shape), rng.normal(size=shape[0])
    expected = dense.solve(A, b, damp)
    x, info = solve(
        (scale * A).astype(np.float32), b.astype(np.float32), damp=float(np.float32(scale * damp))
    )
    assert info.converged
    assert info.iterations == 1
    np.testing.assert_allclose(x * np.float32(scale), expected, rtol=1e-5)


@pytest.mark.parametrize("case", dense.CASES, ids=str)
@pytest.mark.parametrize("damp", [0.0, 0.3])
def test_info_reports_the_norms_of_the_solution(x64, case, damp):
    A, _, _, b = case.problem()
    for solver in [cx.LSMR(), cx.CG(), *(DIRECT if case.full_rank else [])]:
        x, info = solve(A, b, damp=damp, solver=solver)
        residual = b - A @ x
        size = np.hypot(np.linalg.norm(residual), damp * np.linalg.norm(x))
        normal = np.linalg.norm(A.T @ residual - damp**2 * x)
        np.testing.assert_allclose(info.residual_norm, size, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(info.normal_residual_norm, normal, rtol=1e-3, atol=1e-9)


def test_condition_estimate_is_of_the_right_order(x64):
    A = dense.matrix(50, 20, condition=300.0)
    b = np.random.default_rng(0).normal(size=50)
    info = solve(A, b, solver=cx.LSMR(rtol=1e-12))[1]
    assert 50 <= info.condition <= 1000


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 8),
    columns=st.integers(1, 8),
    deficiency=st.integers(0, 3),
    damp=st.sampled_from([0.0, 0.1, 2.0]),
    seed=st.integers(0, 100),
)
def test_solutions_agree_for_any_shape_and_rank(rows, columns, deficiency, damp, seed):
    rank = max(1, min(rows, columns) - deficiency)
    A = dense.matrix(rows, columns, rank=rank, seed=seed)
    b = np.random.default_rng(seed).normal(size=rows)
    with jax.enable_x64(True):
        x, info = solve(A, b, damp=damp, solver=TIGHT)
    assert info.converged
    np.testing.assert_allclose(x, dense.solve(A, b, damp), rtol=1e-9, atol=1e-10)


# --- Against SciPy --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(80, 30), (30, 80), (50, 50)])
@pytest.mark.parametrize("damp", [0.0, 0.1])
@pytest.mark.parametrize("rtol", [1e-3, 1e-8])
@pytest.mark.parametrize("condition", [2.0, 10.0])
def test_lsmr_stops_where_scipy_stops(x64, shape, damp, rtol, condition):
    A = dense.matrix(*shape, condition=condition)
    b = np.random.default_rng(0).normal(size=shape[0])
    theirs = scipy.sparse.linalg.lsmr(A, b, damp=damp, atol=rtol, btol=rtol, maxiter=1000)
    info = solve(A, b, damp=damp, solver=cx.LSMR(rtol=rtol))[1]
    assert abs(int(info.iterations) - theirs[2]) <= 1
    # Rounding makes later iterates differ, SciPy's from its own after a permutation of the rows.
    few = cx.LSMR(rtol=0.0, condition_limit=float("inf"), max_iterations=6)
    early = scipy.sparse.linalg.lsmr(A, b, damp=damp, atol=0, btol=0, conlim=0, maxiter=6)
    x, info = solve(A, b, damp=damp, solver=few)
    np.testing.assert_allclose(x, early[0], rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(info.residual_norm, early[3], rtol=1e-10)
    np.testing.assert_allclose(info.normal_residual_norm, early[4], rtol=1e-9)


def test_lsmr_stops_at_the_condition_limit_as_scipy_does(x64):
    A = dense.matrix(40, 20, condition=1e6)
    b = np.random.default_rng(0).normal(size=40)
    theirs = scipy.sparse.linalg.lsmr(A, b, atol=0, btol=0, conlim=1e3, maxiter=1000)
    info = solve(A, b, solver=cx.LSMR(rtol=0.0, condition_limit=1e3))[1]
    assert not info.converged
    assert info.reason == cx.Reason.CONDITION
    assert abs(int(info.iterations) - theirs[2]) <= 1


def test_running_out_of_iterations_is_reported():
    A = dense.matrix(40, 20, condition=1e3).astype(np.float32)
    info = solve(A, np.ones(40, np.float32), solver=cx.LSMR(max_iterations=3))[1]
    assert info.iterations == 3
    assert not info.converged
    assert info.reason == cx.Reason.MAX_ITERATIONS
    assert "max_iterations" in info.explain()
