"""Inequalities: rows act only when they have to."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize

import constrainx as cx
from constrainx.constraints._compose import Composed, Member


def at_most(function, gamma=1.0):
    """A plain function of an array as an inequality, function ≤ 0."""
    return Composed(
        (
            Member(
                "at-most",
                lambda p, batch, key, model: jnp.atleast_1d(function(p)),
                gamma,
                kind="inequality",
            ),
        )
    )


def train(constraint, gradient, start, *, steps=2000, rate=0.02):
    optimizer = cx.constrain(optax.sgd(rate), constraint)

    def step(carry, _):
        p, state = carry
        updates, state = optimizer.update(gradient(p), state, p)
        return (optax.apply_updates(p, updates), state), p

    start = jnp.asarray(start)
    (p, _), path = jax.jit(
        lambda start: jax.lax.scan(step, (start, optimizer.init(start)), length=steps)
    )(start)
    return p, path


def test_an_inactive_constraint_changes_nothing(x64):
    far = at_most(lambda p: jnp.sum(p**2) - 100.0)
    _, free = train(at_most(lambda p: jnp.sum(0 * p) - 1.0), lambda p: p - 1.0, [0.0, 2.0])
    _, path = train(far, lambda p: p - 1.0, [0.0, 2.0])
    # Compiled apart, the last bit may differ.
    np.testing.assert_allclose(path, free, rtol=1e-14)


def test_parameters_stop_at_the_boundary_and_can_leave_it(x64):
    disc = at_most(lambda p: jnp.sum(p**2) - 1.0)
    p, path = train(disc, lambda p: p - jnp.array([2.0, 1.0]), [0.0, 0.0])
    np.testing.assert_allclose(p, np.array([2.0, 1.0]) / np.sqrt(5), atol=1e-6)
    assert float(jnp.max(jnp.sum(path**2, axis=1))) < 1 + 1e-2
    inside, _ = train(disc, lambda p: p - 0.1, p)
    np.testing.assert_allclose(inside, [0.1, 0.1], atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_solutions_agree_with_slsqp(x64, seed):
    """Random quadratics in random polytopes and a ball: several active sets."""
    rng = np.random.default_rng(seed)
    A, b = rng.normal(size=(6, 4)), rng.uniform(0.1, 1.0, size=6)
    root = rng.normal(size=(4, 4))
    Q, q = root @ root.T / 2 + np.eye(4), 3 * rng.normal(size=4)

    def constraints(p, np_=np):
        return np_.concatenate([A @ p - b, np_.array([np_.sum(p**2) - 4.0])])

    reference = scipy.optimize.minimize(
        lambda p: 0.5 * p @ Q @ p - q @ p,
        np.zeros(4),
        jac=lambda p: Q @ p - q,
        constraints={"type": "ineq", "fun": lambda p: -constraints(p)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert reference.success
    p, _ = train(
        at_most(lambda p: constraints(p, jnp)), lambda p: Q @ p - q, np.zeros(4), steps=4000
    )
    np.testing.assert_allclose(p, reference.x, atol=1e-4)


def test_inequalities_and_equalities_hold_together(x64):
    equality = cx.compose(lambda p: jnp.sum(p) - 1.0, gamma=1.0)
    both = Composed((*equality.members, *at_most(lambda p: p - 0.5).members))
    p, _ = train(both, lambda p: p - jnp.array([2.0, 0.3, -1.0, 0.1]), np.zeros(4))
    reference = scipy.optimize.minimize(
        lambda p: 0.5 * np.sum((p - np.array([2.0, 0.3, -1.0, 0.1])) ** 2),
        np.zeros(4),
        constraints=[
            {"type": "eq", "fun": lambda p: np.sum(p) - 1},
            {"type": "ineq", "fun": lambda p: 0.5 - p},
        ],
        method="SLSQP",
        options={"ftol": 1e-14},
    )
    np.testing.assert_allclose(p, reference.x, atol=1e-6)


def test_a_step_is_differentiable_where_the_active_set_does_not_change(x64):
    def step(bound):
        constraint = at_most(lambda p: p - bound)
        return jnp.sum(
            cx.project(jnp.array([1.0, 0.2]), constraint, jnp.array([0.0, 0.0])).update ** 2
        )

    bound = jnp.array([0.5, 0.9])
    gradient = jax.grad(step)(bound)
    np.testing.assert_allclose(gradient, [1.0, 0.0], atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("rows", "size"), [(6, 20), (15, 20), (16, 6)])
def test_iterations_solve_quadratic_programs(x64, rows, size, dtype):
    """Rows and metrics of different scales, duplicates, and more rows than parameters.

    The reference is least-distance programming by SciPy's non-negative least squares.
    """
    rng = np.random.default_rng(rows)
    rtol, tolerance = (1e-8, 1e-5) if dtype == np.float64 else (1e-5, 1e-2)

    @jax.jit
    def project(J, c, u, metric):
        found = cx.project(
            u,
            at_most(lambda p: J @ p + c),
            jnp.zeros(size, dtype),
            metric=metric,
            solver=cx.LSMR(rtol=rtol),
        )
        return found.update, found.reports["at-most"]

    for trial in range(40):
        J, u, inside = rng.normal(size=(rows, size)), rng.normal(size=size), rng.normal(size=size)
        metric = 10.0 ** rng.uniform(-1, 1, size=size)
        if trial % 3 == 0:
            J[-1] = 1.7 * J[0]
        J *= 10.0 ** rng.uniform(-1, 1, size=(rows, 1))
        # Some room for the rounding of c, without which there may be no solution.
        room = 0.01 + np.abs(rng.normal(size=rows)) * (rng.uniform(size=rows) < 0.7)
        c = -J @ inside - room * np.linalg.norm(J, axis=1)
        J, c, u, metric = (a.astype(dtype) for a in (J, c, u, metric))
        found, report = project(J, c, u, metric)
        exact = find_nearest(*(a.astype(float) for a in (J, -c, u, metric)))
        np.testing.assert_allclose(found, exact, atol=tolerance * (1 + np.linalg.norm(exact)))
        assert report.resolved
        assert report.converged


def find_nearest(J, bound, u, metric):
    """The nearest v with J v ≤ bound, in the metric's inverse (Lawson and Hanson, chapter 23)."""
    rows = J * np.sqrt(metric)
    lengths = np.linalg.norm(rows, axis=1)
    system = -np.vstack([(rows / lengths[:, None]).T, (bound - J @ u) / lengths])
    right = np.eye(len(system))[-1]
    multipliers, _ = scipy.optimize.nnls(system, right)
    residual = system @ multipliers - right
    return u - np.sqrt(metric) * residual[:-1] / residual[-1]


def test_iterations_say_that_a_program_has_no_solution():
    def contradict(p):
        return jnp.concatenate([p[:1] + 1, 1 - p[:1], p[1:] - 0.1])

    found = cx.project(jnp.ones(4), at_most(contradict), jnp.zeros(4), solver=cx.LSMR(rtol=1e-5))
    assert not found.reports["at-most"].resolved
    np.testing.assert_allclose(found.update[1:], 0.1, atol=1e-4)
    assert float(jnp.max(jnp.abs(found.update))) < 10


@pytest.mark.parametrize(
    ("ratio", "spread", "room", "most"),
    [
        pytest.param(6, 1, lambda x: 0.01 + np.maximum(x, 0), 0.5, id="metric"),
        pytest.param(0, 3, lambda x: 0.3 + 0.3 * x, 0.02, id="scales"),
    ],
)
def test_a_program_that_float32_cannot_solve_is_not_called_resolved(ratio, spread, room, most):
    """More rows than parameters, with a metric of a large ratio, or almost without a solution."""
    rng = np.random.default_rng(16)
    rows, size = 16, 6

    @jax.jit
    def project(J, c, u, metric):
        constraint = at_most(lambda p: jax.lax.dot(J, p, precision="highest") + c)
        found = cx.project(u, constraint, jnp.zeros(size), metric=metric, solver="gram")
        return found.update, found.reports["at-most"].resolved

    unknown = 0
    for _ in range(150):
        J = rng.normal(size=(rows, size)) * 10.0 ** rng.uniform(-spread, spread, size=(rows, 1))
        metric = 10.0 ** rng.uniform(-ratio / 2, ratio / 2, size=size)
        u, inside = rng.normal(size=(2, size))
        c = -J @ inside - room(rng.normal(size=rows)) * np.linalg.norm(J, axis=1)
        given = [a.astype(np.float32) for a in (J, c, u, metric)]
        found, resolved = project(*given)
        J, c, u, metric = (a.astype(float) for a in given)
        feasible = is_feasible(J, -c)
        unknown += feasible and not resolved
        if resolved:
            assert feasible
            exact = find_nearest(J, -c, u, metric)
            away, moved = (np.linalg.norm(v / np.sqrt(metric)) for v in (found - exact, exact - u))
            assert away <= 0.02 * moved
    assert unknown <= most * 150


def is_feasible(J, bound):
    """Whether there is a v with J v ≤ bound, up to 1e-5 in rows of unit length."""
    lengths = np.linalg.norm(J, axis=1)
    system = np.hstack([J / lengths[:, None], -np.ones((len(J), 1))])
    least = scipy.optimize.linprog(
        np.eye(system.shape[1])[-1],
        A_ub=system,
        b_ub=bound / lengths,
        bounds=[(None, None)] * J.shape[1] + [(-1, None)],
    )
    return least.fun <= 1e-5
