"""Soft rows: a step that does what they ask for as far as it is cheap."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
from flax import nnx

import constrainx as cx
from constrainx.constraints._compose import Composed, Member

SOLVERS = ["gram", cx.LSMR(rtol=1e-13, max_iterations=2000)]


def linear(name, A, b, **settings):
    """The rows A p − b of parameters {"w", "v"} as one constraint."""

    def rows(p, batch, key, model):
        return A @ jnp.concatenate([p["w"].ravel(), p["v"]]) - b

    return Member(name, rows, **{"gamma": 0.3, **settings})


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    parameters = {"v": jnp.asarray(rng.normal(size=5)), "w": jnp.asarray(rng.normal(size=(3, 4)))}
    update = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), parameters)
    # Rows of one constraint a hundred times as long as those of the other.
    A, B = rng.normal(size=(4, 17)), 100 * rng.normal(size=(3, 17))
    return parameters, update, A, rng.normal(size=4), B, rng.normal(size=3)


def flat(tree):
    return np.concatenate([np.ravel(tree["w"]), tree["v"]])


def solve_densely(update, J, gram_scales, mus, excess, D=None):
    """u − D Jᵀ(J D Jᵀ + M)⁻¹ e, with M in units of the mean diagonal of each block."""
    D = np.ones(len(update)) if D is None else D
    gram = (J * D) @ J.T
    M = np.concatenate(
        [np.full(n, mu * s) for n, mu, s in zip((4, 3), mus, gram_scales, strict=True)]
    )
    return update - D * (J.T @ np.linalg.solve(gram + np.diag(M), excess))


@pytest.mark.parametrize("solver", SOLVERS, ids=["gram", "lsmr"])
@pytest.mark.parametrize("mus", [(0.0, 0.5), (2.0, 0.5), (0.0, 0.0), (1e3, 1e-3)])
def test_a_step_agrees_with_a_dense_solve(x64, monkeypatch, problem, solver, mus):
    parameters, update, A, a, B, b = problem
    J = np.concatenate([A, B])
    scales = np.mean(np.sum(A**2, 1)), np.mean(np.sum(B**2, 1))
    if solver != "gram":
        # Probes know a mean length to ten per cent, and are not what is tested here.
        exact = jnp.concatenate([jnp.full(4, scales[0]), jnp.full(3, scales[1])])
        from constrainx.step._iterative_system import IterativeSystem

        monkeypatch.setattr(IterativeSystem, "_estimate_lengths", lambda *_: jnp.sqrt(exact))
    constraints = Composed(
        (linear("a", A, a, damping=mus[0]), linear("b", B, b, damping=mus[1], gamma=0.7))
    )
    found = cx.project(update, constraints, parameters, solver=solver)
    c = np.concatenate([A @ flat(parameters) - a, B @ flat(parameters) - b])
    excess = J @ flat(update) + np.repeat([0.3, 0.7], [4, 3]) * c
    wanted = solve_densely(flat(update), J, scales, mus, excess)
    np.testing.assert_allclose(flat(found.update), wanted, rtol=1e-7, atol=1e-9)
    assert all(report.resolved for report in found.reports.values())


def test_probes_measure_mean_lengths_well_enough(x64, problem):
    parameters, update, A, a, *_ = problem
    constraints = Composed((linear("a", A, a, damping=1.0),))
    exact = cx.project(update, constraints, parameters, solver="gram").update
    probed = cx.project(update, constraints, parameters, solver=SOLVERS[1]).update
    asked = flat(exact) - flat(update)
    assert np.linalg.norm(flat(probed) - flat(exact)) < 0.2 * np.linalg.norm(asked)


@pytest.mark.parametrize("solver", SOLVERS, ids=["gram", "lsmr"])
def test_the_metric_counts_for_the_mean_length(x64, problem, solver):
    parameters, update, *_ = problem
    rng = np.random.default_rng(1)
    A, a = rng.normal(size=(1, 17)), rng.normal(size=1)
    metric = jax.tree.map(lambda p: jnp.asarray(rng.uniform(0.1, 10, size=p.shape)), parameters)
    constraints = Composed((linear("a", A, a, damping=2.0),))
    found = cx.project(update, constraints, parameters, solver=solver, metric=metric).update
    D = flat(metric)
    gram = (A * D) @ A.T
    excess = A @ flat(update) + 0.3 * (A @ flat(parameters) - a)
    wanted = flat(update) - D * (A.T @ (excess / (3 * gram[0])))
    np.testing.assert_allclose(flat(found), wanted, rtol=1e-7)


def test_a_row_by_itself_gets_its_share(x64):
    """μ = 1 does half, and a large μ pulls like a penalty."""
    start = jnp.array([3.0, 4.0])

    def project(mu, gamma):
        circle = Member("c", lambda p, *_: jnp.sum(p**2)[None] - 1, gamma, damping=mu)
        return cx.project(jnp.zeros(2), Composed((circle,)), start).update

    np.testing.assert_allclose(project(1.0, 1.0), project(0.0, 1.0) / 2, rtol=1e-12)
    # γ / (μ ḡ) = w, with the squared length ḡ of the row.
    mu, weight = 1e8, 0.01
    squared = 4 * jnp.sum(start**2)
    penalty = jax.grad(lambda p: weight * (jnp.sum(p**2) - 1) ** 2 / 2)(start)
    np.testing.assert_allclose(project(mu, weight * mu * squared), -penalty, rtol=1e-7)


@pytest.mark.parametrize("solver", SOLVERS, ids=["gram", "lsmr"])
def test_contradicting_rows_that_are_soft_are_resolved(x64, solver):
    def rows(p, batch, key, model):
        return jnp.stack([p[0] - 1.0, p[0] + 1.0])

    def project(damping):
        constraints = Composed((Member("both", rows, 1.0, damping=damping),))
        return cx.project(jnp.zeros(2), constraints, jnp.array([0.5, 0.0]), solver=solver)

    assert not project(0.0).reports["both"].resolved
    soft = project(0.1)
    assert soft.reports["both"].resolved
    # G = 1 everywhere, λ = (G + 0.1)⁻¹ c = ((G + 0.1)⁻¹ (−0.5, 1.5)), whose sum is 1 / 2.1.
    np.testing.assert_allclose(soft.update, [-1 / 2.1, 0], atol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS, ids=["gram", "lsmr"])
def test_soft_inequalities_solve_their_program(x64, solver):
    rng = np.random.default_rng(3)
    A, slack = rng.normal(size=(5, 6)), rng.uniform(-1, 1, size=5)
    mu, update = 0.5, rng.normal(size=6)
    member = Member("at-most", lambda p, *_: A @ p + slack, 1.0, kind="inequality", damping=mu)
    found = cx.project(jnp.asarray(update), Composed((member,)), jnp.zeros(6), solver="gram")
    m = mu * np.mean(np.sum(A**2, 1))
    # At zero the rows are `slack`, so each asks for A u ≤ −slack.
    start = np.concatenate([update, np.zeros(5)])
    reference = scipy.optimize.minimize(
        lambda z: 0.5 * np.sum((z - start) ** 2),
        start,
        jac=lambda z: z - start,
        constraints={"type": "ineq", "fun": lambda z: -(A @ z[:6] - np.sqrt(m) * z[6:] + slack)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    assert reference.success
    np.testing.assert_allclose(found.update, reference.x[:6], atol=1e-6)
    assert found.reports["at-most"].resolved
    if solver != "gram":
        probed = cx.project(jnp.asarray(update), Composed((member,)), jnp.zeros(6), solver=solver)
        assert probed.reports["at-most"].resolved
        assert np.linalg.norm(probed.update - found.update) < 0.1


@pytest.mark.parametrize("solver", SOLVERS, ids=["gram", "lsmr"])
def test_a_step_can_be_differentiated_by_its_damping(x64, problem, solver):
    parameters, update, A, a, *_ = problem

    def length(mu):
        constraints = Composed((linear("a", A, a, damping=lambda _: mu),))
        return optax.global_norm(cx.project(update, constraints, parameters, solver=solver).update)

    for mu in (0.0, 0.5):
        gradient = jax.grad(length)(mu)
        if mu == 0 and solver != "gram":
            assert np.isfinite(gradient)
            continue
        h = 1e-6
        numeric = (length(mu + h) - length(max(mu - h, 0))) / (h + min(mu, h))
        np.testing.assert_allclose(gradient, numeric, rtol=1e-4)


def test_a_schedule_goes_from_soft_to_hard(x64):
    """The update of a step is exact once the damping is zero, and not before."""
    damping = optax.linear_schedule(10.0, 0.0, 3)
    circle = Member("c", lambda p, *_: jnp.sum(p**2)[None] - 1, 1.0, damping=damping)
    optimizer = cx.constrain(optax.sgd(0.1), Composed((circle,)))
    p = jnp.array([2.0, 1.0])
    state = optimizer.init(p)
    left = []
    for _ in range(5):
        updates, state = optimizer.update(jnp.ones(2), state, p)
        asked = p @ p - 1
        left.append(float(abs(2 * p @ updates + asked) / asked))
        p = optax.apply_updates(p, updates)
    assert left[0] > 0.5
    assert left[3] < 1e-9
    assert left[4] < 1e-9


def test_a_schedule_that_returns_nonsense_stops_the_run():
    circle = Member("c", lambda p, *_: jnp.sum(p**2)[None] - 1, 1.0, damping=lambda _: -1.0)
    found = cx.project(jnp.zeros(2), Composed((circle,)), jnp.ones(2))
    assert np.isnan(found.update).all()


@pytest.mark.parametrize("damping", [-1.0, float("nan"), "soft"])
def test_a_damping_that_is_not_allowed_is_refused(damping):
    with pytest.raises(cx.ArgumentError, match=r"UnitNorm\(damping=\.\.\.\)"):
        cx.UnitNorm(of=lambda m: m.kernel[...], damping=damping)


def test_a_constraint_of_a_model_can_be_soft():
    model = cx.attach(
        nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
        cx.UnitNorm(of=lambda m: m.kernel[...], damping=1.0),
    )
    hard = cx.compose(cx.UnitNorm(of=lambda m: m.kernel[...], gamma=1.0), model=model)
    soft = cx.compose(cx.UnitNorm(of=lambda m: m.kernel[...], gamma=1.0, damping=1.0), model=model)
    parameters = nnx.state(model, nnx.Param)
    nothing = jax.tree.map(jnp.zeros_like, parameters)
    full, half = (
        cx.project(nothing, constraint, parameters, model=model).update
        for constraint in (hard, soft)
    )
    np.testing.assert_allclose(half["kernel"][...], full["kernel"][...] / 2, rtol=1e-5)
