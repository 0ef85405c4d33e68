"""Soft rows: a step that does what they ask for as far as it is cheap."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
from flax import nnx

import constrainx as cx
from constrainx.constraints import Composed, Member
from constrainx.errors import ArgumentError

SOLVERS = {"gram": "gram", "lsmr": cx.LSMR(rtol=1e-13, max_iterations=2000)}
COUNTS = (4, 3)


def linear(name, A, b, **settings):
    """The rows A p − b of parameters {"v", "w"} as one constraint."""

    def rows(p, batch, key, model):
        return A @ flat(p) - b

    return Member(name, rows, **{"gamma": 0.3, **settings})


def flat(tree):
    return jnp.concatenate([tree["v"], tree["w"].ravel()])


class Linear:
    """Two constraints, one with rows a hundred times as long, and dense references."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.parameters, self.update = (
            {"v": jnp.asarray(rng.normal(size=5)), "w": jnp.asarray(rng.normal(size=(3, 4)))}
            for _ in range(2)
        )
        self.metric = jax.tree.map(
            lambda p: jnp.asarray(rng.uniform(0.1, 10, size=p.shape)), self.parameters
        )
        self.A, self.B = rng.normal(size=(4, 17)), 100 * rng.normal(size=(3, 17))
        self.a, self.b = rng.normal(size=4), rng.normal(size=3)
        self.J = np.concatenate([self.A, self.B])
        self.c = self.J @ flat(self.parameters) - np.concatenate([self.a, self.b])

    def constraints(self, mus, **settings):
        return Composed(
            (
                linear("a", self.A, self.a, damping=lambda _: mus[0], **settings),
                linear("b", self.B, self.b, damping=lambda _: mus[1], **settings),
            )
        )

    def remove(self, vector, mus, excess, D=1.0, P=1.0):
        """v − P D Jᵀ(J P D Jᵀ + M)⁻¹ e, with M in units of the mean diagonal of each block."""
        gram = (self.J * D * P) @ self.J.T
        first, second = np.split(np.diag(gram), [4])
        M = np.repeat([mus[0] * first.mean(), mus[1] * second.mean()], COUNTS)
        multipliers = np.linalg.solve(gram + np.diag(M), excess)
        return vector - P * D * (self.J.T @ multipliers), multipliers


@pytest.fixture
def problem(x64):
    return Linear()


def project(problem, mus, solver, metric=None):
    found = cx.project(
        problem.update,
        problem.constraints(mus),
        problem.parameters,
        solver=SOLVERS[solver],
        metric=metric,
    )
    return flat(found.update), {name: r.resolved for name, r in found.reports.items()}


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_step_and_its_derivative_agree_with_a_dense_solve(problem, solver):
    excess = problem.J @ flat(problem.update) + 0.3 * problem.c

    def square(mus):
        found, resolved = project(problem, mus, solver)
        return jnp.sum(found**2), (found, resolved)

    def dense(mus):
        return problem.remove(flat(problem.update), mus, excess)[0]

    differentiate = jax.jit(jax.grad(square, has_aux=True))
    for mus in [(0.3, 0.5), (1e3, 1e-3), (0.0, 0.5), (0.0, 0.0)]:
        gradient, (found, resolved) = differentiate(jnp.array(mus))
        np.testing.assert_allclose(found, dense(mus), rtol=1e-7, atol=1e-9)
        assert all(resolved.values())
        h = 1e-5 * max(mus[0], 0.01)
        above, below = (np.sum(dense((mus[0] + change, mus[1])) ** 2) for change in (h, -h))
        if solver == "gram" or mus[0] > 0:
            np.testing.assert_allclose(gradient[0], (above - below) / (2 * h), rtol=1e-5)
        else:
            assert np.isnan(gradient[0])  # rather than a wrong number: it uses the root of μ


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_damping_is_in_units_of_the_metric(problem, solver):
    excess = problem.J @ flat(problem.update) + 0.3 * problem.c
    step = jax.jit(lambda mus: project(problem, mus, solver, problem.metric))
    found, resolved = step(jnp.array([2.0, 0.5]))
    D = flat(problem.metric)
    wanted, _ = problem.remove(flat(problem.update), (2.0, 0.5), excess, D)
    np.testing.assert_allclose(found, wanted, rtol=1e-7, atol=1e-9)
    assert all(resolved.values())


def test_the_mean_length_of_many_rows_is_estimated(x64):
    rng = np.random.default_rng(5)
    A = rng.normal(size=(40, 60))
    c, update = rng.normal(size=40), rng.normal(size=60)
    soft = Member("c", lambda p, *_: A @ p + c, 1.0, damping=1.0)
    project = jax.jit(functools.partial(cx.project, solver=SOLVERS["lsmr"]), static_argnums=1)
    found = project(jnp.asarray(update), Composed((soft,)), jnp.zeros(60))
    gram = A @ A.T
    m = np.mean(np.diag(gram)) * np.eye(40)
    asked = A.T @ np.linalg.solve(gram + m, A @ update + c)
    off = np.linalg.norm(update - asked - found.update) / np.linalg.norm(asked)
    assert 0 < off < 0.05


@pytest.mark.parametrize("solver", SOLVERS)
def test_contradicting_rows_that_are_soft_are_resolved(x64, solver):
    @jax.jit
    def project(mu):
        both = Member("both", lambda p, *_: jnp.stack([p[0] - 1, p[0] + 1]), 1.0)
        both = dataclasses.replace(both, damping=lambda _: mu)
        start = jnp.array([0.5, 0.0])
        found = cx.project(jnp.zeros(2), Composed((both,)), start, solver=SOLVERS[solver])
        return found.update, found.reports["both"].resolved

    assert not project(0.0)[1]
    update, resolved = project(0.1)
    assert resolved
    # G = 1 everywhere, λ = (G + 0.1)⁻¹ (−0.5, 1.5), whose sum is 1 / 2.1.
    np.testing.assert_allclose(update, [-1 / 2.1, 0], atol=1e-6)
    # A damping that is lost in rounding is no excuse.
    assert not project(1e-17)[1]


@pytest.mark.parametrize("solver", SOLVERS)
def test_soft_inequalities_solve_their_program(x64, solver):
    rng = np.random.default_rng(3)
    A, slack = rng.normal(size=(5, 6)), rng.uniform(-1, 1, size=5)
    mu, update = 0.5, rng.normal(size=6)
    member = Member("at-most", lambda p, *_: A @ p + slack, 1.0, kind="inequality", damping=mu)
    project = jax.jit(functools.partial(cx.project, solver=SOLVERS[solver]), static_argnums=1)
    found = project(jnp.asarray(update), Composed((member,)), jnp.zeros(6))
    root = np.sqrt(mu * np.mean(np.sum(A**2, 1)))
    # At zero the rows are `slack`, so each asks for A u ≤ −slack.
    start = np.concatenate([update, np.zeros(5)])
    reference = scipy.optimize.minimize(
        lambda z: 0.5 * np.sum((z - start) ** 2),
        start,
        jac=lambda z: z - start,
        constraints={"type": "ineq", "fun": lambda z: root * z[6:] - A @ z[:6] - slack},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    assert reference.success
    assert np.sum(reference.x[6:] > 1e-3) in range(1, 5)  # some rows act, and some do not
    np.testing.assert_allclose(found.update, reference.x[:6], atol=1e-6)
    assert found.reports["at-most"].resolved


def test_one_row_gets_its_share_and_pulls_like_a_penalty(x64):
    start = jnp.array([3.0, 4.0])

    @functools.partial(jax.jit, static_argnames="placement")
    def step(mu, placement):
        circle = Member("c", lambda p, *_: jnp.sum(p**2)[None] - 1, 1.0, placement=placement)
        circle = dataclasses.replace(circle, damping=lambda _: mu)
        optimizer = cx.constrain(optax.sgd(0.1), Composed((circle,)))
        return optimizer.update(jnp.zeros(2), optimizer.init(start), start)[0]

    for placement in ("gradient", "update", "twice"):
        hard, soft = step(0.0, placement), step(1.0, placement)
        np.testing.assert_allclose(soft, hard / 2, rtol=1e-12)
    # γ / (μ ḡ), with the squared length ḡ of the row.
    weight = 1 / (1e9 * 4 * jnp.sum(start**2))
    penalty = jax.grad(lambda p: weight * (jnp.sum(p**2) - 1) ** 2 / 2)(start)
    np.testing.assert_allclose(step(1e9, "gradient"), -0.1 * penalty, rtol=1e-7)
    np.testing.assert_allclose(step(1e9, "update"), -penalty, rtol=1e-7)


def test_both_stages_are_soft_where_only_some_parameters_move(problem):
    mus, gradient, rate = (0.5, 0.1), problem.update, 0.1
    constraints = problem.constraints(
        mus, placement="twice", movable=lambda p: [path == "w" for path in sorted(p)]
    )
    P = np.repeat([0.0, 1.0], [5, 12])
    method = cx.NullSpace(solver="gram")
    optimizer = cx.constrain(optax.sgd(rate), constraints, method=method)
    state = optimizer.init(problem.parameters)
    updates, state = jax.jit(optimizer.update)(gradient, state, problem.parameters)
    # Before the optimizer, without a pull and in the space of what may move.
    descent = -flat(gradient)
    descent, _ = problem.remove(descent, mus, problem.J @ (P * descent), P=P)
    excess = problem.J @ (rate * descent) + 0.3 * problem.c
    wanted, multipliers = problem.remove(rate * descent, mus, excess, P=P)
    np.testing.assert_allclose(flat(updates), wanted, rtol=1e-7, atol=1e-10)
    assert all(report.resolved for report in cx.reports(state).values())
    assert np.max(np.abs(multipliers)) > 0


def test_a_schedule_goes_from_soft_to_hard(x64):
    damping = optax.linear_schedule(10.0, 0.0, 3)
    circle = Member("c", lambda p, *_: jnp.sum(p**2)[None] - 1, 1.0, damping=damping)
    optimizer = cx.constrain(optax.sgd(0.1), Composed((circle,)))
    p = jnp.array([2.0, 1.0])
    state = optimizer.init(p)
    step = jax.jit(optimizer.update)
    left = []
    for _ in range(5):
        updates, state = step(jnp.ones(2), state, p)
        asked = p @ p - 1
        left.append(float(abs(2 * p @ updates + asked) / asked))
        assert cx.reports(state)["c"].resolved
        p = optax.apply_updates(p, updates)
    assert left[0] > 0.5
    assert max(left[3:]) < 1e-9


def test_rows_on_examples_of_a_network_are_soft_in_single_precision():
    """Rows by the factors of activations and signals, against the dense Jacobian in float64."""
    model = nnx.Sequential(
        nnx.Linear(3, 64, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(64, 2, rngs=nnx.Rngs(1))
    )
    x = jax.random.normal(jax.random.key(0), (6, 3))

    class SmallOutput(cx.Constraint):
        def residual(self, model, batch, *, key):
            return model(batch) - 1.0

    constraint = SmallOutput(reduce="norm", gamma=1.0, damping=0.2)
    constraints = cx.compose(constraint, model=model)
    parameters = nnx.state(model, nnx.Param)
    nothing = jax.tree.map(jnp.zeros_like, parameters)
    found = jax.jit(cx.project, static_argnums=1)(nothing, constraints, parameters, batch=x)
    vector, rebuild = jax.flatten_util.ravel_pytree(parameters)
    graph = nnx.graphdef(model)

    def rows(vector):
        return jnp.linalg.norm(nnx.merge(graph, rebuild(vector))(x) - 1.0, axis=1)

    J, c = (np.asarray(v, np.float64) for v in (jax.jacrev(rows)(vector), rows(vector)))
    gram = J @ J.T
    wanted = -J.T @ np.linalg.solve(gram + 0.2 * np.mean(np.diag(gram)) * np.eye(6), c)
    update = jax.flatten_util.ravel_pytree(found.update)[0]
    np.testing.assert_allclose(update, wanted, atol=1e-5 * np.max(np.abs(wanted)))
    assert found.reports["small-output"].resolved


def test_a_soft_constraint_is_not_moved_to_its_nearest_point():
    class ZeroSum(cx.Constraint):
        def residual(self, model, batch, *, key):
            return jnp.sum(model.kernel[...])[None]

        def nearest(self, model):
            model.kernel[...] -= jnp.mean(model.kernel[...])

    model = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
    parameters = nnx.state(model, nnx.Param)
    nothing = jax.tree.map(jnp.zeros_like, parameters)

    def step(damping):
        constraint = ZeroSum(gamma=1.0, damping=damping)
        optimizer = cx.constrain(optax.sgd(0.1), constraint, model=model)
        step = jax.jit(optimizer.update)
        updates, state = step(nothing, optimizer.init(parameters), parameters)
        assert cx.reports(state)["zero-sum"].resolved
        return updates["kernel"][...]

    mean = jnp.mean(model.kernel[...])
    np.testing.assert_allclose(step(0.0), jnp.full((3, 1), -mean), rtol=1e-5)
    np.testing.assert_allclose(step(3.0), jnp.full((3, 1), -mean / 4), rtol=1e-5)


def test_a_schedule_that_returns_nonsense_stops_the_run():
    circle = Member("c", lambda p, *_: jnp.sum(p**2)[None] - 1, 1.0, damping=lambda _: -1.0)
    found = jax.jit(cx.project, static_argnums=1)(jnp.zeros(2), Composed((circle,)), jnp.ones(2))
    assert np.isnan(found.update).all()


@pytest.mark.parametrize("damping", [-1.0, float("nan"), "soft"])
def test_a_damping_that_is_not_allowed_is_refused(damping):
    with pytest.raises(ArgumentError, match=r"UnitNorm\(damping=\.\.\.\)"):
        cx.UnitNorm(of=lambda m: m.kernel[...], damping=damping)
