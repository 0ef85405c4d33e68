"""The null-space step in Optax."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx

RNG = np.random.default_rng(0)
TREE = {
    "w": jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32),
    "b": jnp.asarray(RNG.normal(size=3), jnp.float32),
}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "scheduled": optax.adam(optax.cosine_decay_schedule(1e-2, 10)),
    "lion": optax.lion(1e-3),
}
ADAPTIVE = ("adam", "adamw", "clipped", "scheduled")
LSMR = cx.LSMR(rtol=1e-7)


def curved(params):
    """Three rows that are not linear in the parameters."""
    return jnp.tanh(params["w"]).sum(axis=0) * params["b"] - 0.3


def loss(params):
    return sum(jnp.sum(jnp.cos(leaf) + leaf**2) for leaf in params.values())


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, cx.NullSpace()) for name in OPTIMIZERS),
        *(("lion", cx.NullSpace(placement="update", solver=s)) for s in ("gram", LSMR)),
        *((name, cx.NullSpace(metric="optimizer")) for name in ADAPTIVE),
        *((name, cx.NullSpace(metric="optimizer", solver=LSMR)) for name in ADAPTIVE),
    ],
)
def test_updates_of_any_optimizer_satisfy_the_linearised_constraint(name, method):
    optimizer = cx.constrain(OPTIMIZERS[name], curved, gamma=0.3, method=method)
    params, state = TREE, optimizer.init(TREE)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        _, moved = jax.jvp(curved, (params,), (updates,))
        return optax.apply_updates(params, updates), state, moved, curved(params)

    for _ in range(5):
        params, state, moved, c = step(params, state)
        np.testing.assert_allclose(moved, -0.3 * c, rtol=2e-4, atol=2e-6)
    assert all(report.resolved for report in cx.reports(state).values())


def test_nullspace_matches_the_formula_of_the_paper(x64):
    """g − J⁺(J g − γ c) from dense linear algebra, before SGD and before Adam."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), TREE)
    gradient = jax.grad(loss)(params)
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    J = jax.jacobian(lambda p: curved(unravel(p)))(flat)
    g, c = jax.flatten_util.ravel_pytree(gradient)[0], curved(params)
    expected = g - np.linalg.pinv(J) @ (J @ g - 0.7 * c)
    transform = cx.nullspace(curved, gamma=0.7)
    result, _ = transform.update(gradient, transform.init(params), params)
    np.testing.assert_allclose(jax.flatten_util.ravel_pytree(result)[0], expected, rtol=1e-9)

    chained = optax.chain(cx.nullspace(curved, gamma=0.7), optax.adam(1e-2))
    by_hand = optax.adam(1e-2)
    update, _ = chained.update(gradient, chained.init(params), params)
    other, _ = by_hand.update(unravel(expected), by_hand.init(params), params)
    for mine, theirs in zip(jax.tree.leaves(update), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-8)


def test_adam_leaves_the_null_space_and_constrain_does_not():
    before = optax.chain(cx.nullspace(curved, gamma=0.0), optax.adam(1e-2))
    after = cx.constrain(optax.adam(1e-2), curved, gamma=0.0)
    speeds = []
    for optimizer in (before, after):
        updates, _ = optimizer.update(jax.grad(loss)(TREE), optimizer.init(TREE), TREE)
        _, moved = jax.jvp(curved, (TREE,), (updates,))
        speeds.append(float(jnp.linalg.norm(moved)))
    assert speeds[1] < 1e-3 * speeds[0]


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_a_convex_problem_converges_to_its_kkt_point(x64, name):
    """min ½xᵀQx − qᵀx with A x = b has the closed form of its KKT system."""
    rng = np.random.default_rng(1)
    root = rng.normal(size=(6, 6))
    Q, q = root @ root.T + np.eye(6), rng.normal(size=6)
    A, b = rng.normal(size=(2, 6)), rng.normal(size=2)
    system = np.block([[Q, A.T], [A, np.zeros((2, 2))]])
    exact = np.linalg.solve(system, np.concatenate([q, b]))
    rate = optax.exponential_decay(0.02, 500, 0.5)
    inner = {
        "sgd": optax.sgd(0.02),
        "momentum": optax.sgd(0.005, momentum=0.9),
        "adam": optax.adam(rate),
    }[name]
    # In the Euclidean metric, updates of Adam would lead elsewhere.
    method = (
        cx.NullSpace(metric="optimizer") if name == "adam" else cx.NullSpace(placement="update")
    )
    optimizer = cx.constrain(inner, lambda x: A @ x - b, gamma=1.0, method=method)

    @jax.jit
    def run(x):
        def step(carry, _):
            x, state = carry
            updates, state = optimizer.update(Q @ x - q, state, x)
            return (optax.apply_updates(x, updates), state), None

        return jax.lax.scan(step, (x, optimizer.init(x)), length=6000)[0]

    x, _ = run(jnp.zeros(6))
    np.testing.assert_allclose(x, exact[:6], atol=2e-5)
    multipliers = cx.project(
        -(Q @ x - q), cx.compose(lambda x: A @ x - b, gamma=1.0), x
    ).multipliers["constraint"]
    np.testing.assert_allclose(multipliers, exact[6:], atol=2e-3)


@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.1])
def test_violations_fall_at_the_predicted_rate(x64, gamma):
    """Quadratic for γ = 1 on a smooth constraint, else linear with the factor 1 − γ."""
    optimizer = cx.constrain(optax.sgd(0.0), curved, gamma=gamma)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), TREE)
    state, norms = optimizer.init(params), []
    for _ in range(8):
        norms.append(float(jnp.linalg.norm(curved(params))))
        updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
        params = optax.apply_updates(params, updates)
    ratios = [b / a for a, b in itertools.pairwise(norms) if a > 1e-6]
    if gamma == 1.0:
        squares = [b / a**2 for a, b in itertools.pairwise(norms) if a > 1e-6]
        assert norms[-1] < 1e-13
        assert max(squares) < 2.0
    else:
        np.testing.assert_allclose(ratios[-1], 1 - gamma, rtol=0.02)


def test_constrain_works_inside_chain_multi_transform_and_multi_steps():
    def unit(params):
        return jnp.sum(params["b"] ** 2) - 1.0

    start = jax.tree.map(lambda leaf: leaf / 2, TREE)
    constrained = optax.chain(cx.nullspace(unit, gamma=5.0), optax.sgd(0.1))
    variants = {
        "chain": constrained,
        "multi_transform": optax.multi_transform(
            {"free": optax.sgd(0.1), "bound": constrained}, {"w": "free", "b": "bound"}
        ),
        "multi_steps": optax.MultiSteps(constrained, every_k_schedule=2),
    }
    for name, optimizer in variants.items():
        params, state = start, optimizer.init(start)
        step = jax.jit(optimizer.update)
        for _ in range(60):
            updates, state = step(jax.grad(loss)(params), state, params)
            params = optax.apply_updates(params, updates)
        assert abs(unit(params)) < 1e-4, name


def test_nnx_optimizer_passes_on_batch_key_and_model():
    class Odd(cx.Constraint):
        def residual(self, model, batch, *, key):
            x = batch["x"] + 0.01 * jax.random.normal(key, batch["x"].shape)
            return model(x) + model(-x)

    model = nnx.Sequential(
        nnx.Linear(1, 16, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(16, 1, rngs=nnx.Rngs(1))
    )
    model.layers[0].bias[...] = jnp.linspace(-1, 1, 16)
    cx.attach(model, Odd(gamma=1.0, reduce=cx.Norm(groups=4)))
    optimizer = nnx.Optimizer(model, cx.constrain(optax.adam(1e-2), model), wrt=nnx.Param)
    x = jnp.linspace(-2, 2, 32)[:, None]
    batch = {"x": x, "y": jnp.sin(x)}

    @nnx.jit
    def step(model, optimizer, key):
        def mse(model):
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        value, grads = nnx.value_and_grad(mse)(model)
        optimizer.update(model, grads, batch=batch, key=key, module=model)
        return value

    constraint = cx.constraints_of(model)[0].constraint
    before = constraint.violation(model, batch, jax.random.key(0))
    values = [step(model, optimizer, jax.random.key(i)) for i in range(300)]
    after = constraint.violation(model, batch, jax.random.key(0))
    assert values[-1] < 0.05 * values[0]
    assert after < 0.01 * before
    report = cx.reports(optimizer.opt_state)["odd"]
    assert report.violation < 0.1
    assert report.resolved


def test_steps_are_differentiable_with_respect_to_hyperparameters(x64):
    """A γ and a target, learnt through a few unrolled steps."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), TREE)

    def final(hyper, solver):
        def constraint(p):
            return curved(p) + hyper["target"]

        optimizer = cx.constrain(
            optax.adam(1e-2),
            constraint,
            gamma=lambda _: hyper["gamma"],
            method=cx.NullSpace(solver=solver),
        )
        p, state = params, optimizer.init(params)
        for _ in range(3):
            updates, state = optimizer.update(jax.grad(loss)(p), state, p)
            p = optax.apply_updates(p, updates)
        return loss(p)

    hyper = {"gamma": jnp.asarray(0.3), "target": jnp.asarray([0.1, 0.0, -0.2])}
    for solver in ("gram", cx.LSMR(rtol=1e-13)):
        function = jax.jit(functools.partial(final, solver=solver))
        gradient = jax.jit(jax.grad(functools.partial(final, solver=solver)))(hyper)
        for name, index in [("gamma", ()), ("target", (0,)), ("target", (2,))]:
            step = 1e-5
            up = {**hyper, name: hyper[name].at[index].add(step)}
            down = {**hyper, name: hyper[name].at[index].add(-step)}
            expected = (function(up) - function(down)) / (2 * step)
            np.testing.assert_allclose(gradient[name][index], expected, rtol=1e-6)


def test_inexact_solves_end_at_the_same_place():
    rng = np.random.default_rng(0)
    A = jnp.asarray(rng.normal(size=(80, 200)) / 10, jnp.float32)
    goal = jnp.asarray(rng.normal(size=200), jnp.float32)

    def constraint(p):
        return jnp.tanh(A @ p) - 0.1

    def run(solver):
        optimizer = cx.constrain(
            optax.adam(1e-2), constraint, gamma=0.5, method=cx.NullSpace(solver=solver)
        )

        def step(carry, _):
            p, state = carry
            updates, state = optimizer.update(p - goal, state, p)
            return (optax.apply_updates(p, updates), state), cx.reports(state)["constraint"]

        start = (jnp.zeros(200), optimizer.init(jnp.zeros(200)))
        (p, _), reports = jax.jit(lambda: jax.lax.scan(step, start, length=400))()
        return jnp.linalg.norm(constraint(p)), jnp.sum((p - goal) ** 2), reports.iterations.mean()

    tight = run(cx.LSMR(rtol=1e-7))
    loose = run("auto")  # 80 rows: iterative, and inexact by default
    assert loose[2] < 0.5 * tight[2]
    np.testing.assert_allclose(loose[1], tight[1], rtol=1e-3)
    assert loose[0] < 1e-3 * np.sqrt(80)


def test_auto_logs_what_it_picked(caplog):
    many = jnp.zeros((100, 5))
    with caplog.at_level("INFO", logger="constrainx"):
        cx.project(jnp.ones(5), cx.compose(lambda p: p @ p), jnp.ones(5))
        cx.project(jnp.ones(5), cx.compose(lambda p: p[:2]), jnp.ones(5))
        cx.project(jnp.ones(5), cx.compose(lambda p: many @ p), jnp.ones(5))
    text = [record.message for record in caplog.records]
    assert "closed form" in text[0]
    assert "Gram matrix" in text[1]
    assert "LSMR" in text[2]


@pytest.mark.parametrize(
    ("optimizer", "kept"),
    [
        (optax.sgd(0.1), "no such second moments"),
        (optax.adafactor(0.1), "no such second moments"),
        (optax.lion(0.1), "no such second moments"),
        (optax.masked(optax.adam(0.1), {"w": True, "b": False}), "it for some of them only"),
    ],
    ids=["sgd", "adafactor", "lion", "masked"],
)
def test_a_metric_that_the_optimizer_does_not_have_is_refused(optimizer, kept):
    constrained = cx.constrain(optimizer, curved, method=cx.NullSpace(metric="optimizer"))
    with pytest.raises(cx.UserError, match=f"the optimizer keeps {kept}"):
        jax.eval_shape(constrained.update, TREE, constrained.init(TREE), TREE)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: cx.nullspace(3), TypeError, "a constraint must be"),
        (lambda: cx.nullspace(nnx.Linear(1, 1, rngs=nnx.Rngs(0))), ValueError, "nothing to"),
        (lambda: cx.constrain(optax.sgd(1), curved, method="penalti"), ValueError, "'penalty'"),
        (lambda: cx.constrain(optax.sgd(1), curved, method=cx.Penalty), TypeError, "`init`"),
        (lambda: cx.NullSpace(metric="adam"), ValueError, "metric='adam'"),
        (lambda: cx.NullSpace(placement="updates"), ValueError, "Did you mean 'update'"),
        (lambda: cx.NullSpace(solver="grma"), ValueError, "Did you mean 'gram'"),
        (lambda: cx.NullSpace(solver="lsmr"), ValueError, "`solver`"),
        (
            lambda: cx.NullSpace(metric="optimizer", placement="gradient"),
            ValueError,
            "a metric for updates",
        ),
        (
            lambda: cx.nullspace(curved).update(TREE, cx.nullspace(curved).init(TREE)),
            ValueError,
            "linearised at the parameters",
        ),
        (
            lambda: cx.project(TREE, cx.compose(curved), TREE, solver="lsmr"),
            ValueError,
            "`solver`",
        ),
    ],
)
def test_wrong_arguments_are_named_in_the_error(make, error, message):
    with pytest.raises(error, match=message):
        make()
