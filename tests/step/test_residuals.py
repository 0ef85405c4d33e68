"""Residuals as soft rows: Gauss-Newton, momentum and a trust region."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx.constraints import Composed, Member
from constrainx.errors import ArgumentError, ArgumentTypeError


def solution(x):
    return jnp.sin(jnp.pi * x[:, :1]) * jnp.sin(jnp.pi * x[:, 1:])


def equation(model, batch, key):
    x = batch["inside"]

    def second(direction):
        def first(x):
            return jax.jvp(model, (x,), (jnp.broadcast_to(direction, x.shape),))[1]

        return jax.jvp(first, (x,), (jnp.broadcast_to(direction, x.shape),))[1]

    return sum(second(direction) for direction in jnp.eye(2)) + 2 * jnp.pi**2 * solution(x)


def boundary(model, batch, key):
    return model(batch["edge"])


def test_gauss_newton_solves_poissons_equation_within_its_trust_region(x64):
    """With a cap on its steps; without it, training collapses."""
    keys = jax.random.split(jax.random.key(0), 3)
    along, side = jax.random.uniform(keys[0], (32,)), jnp.arange(32) % 4
    edge = jnp.where(
        (side < 2)[:, None], jnp.stack([along, side % 2], 1), jnp.stack([side % 2, along], 1)
    )
    batch = {"inside": jax.random.uniform(keys[1], (64, 2)), "edge": edge}
    layers = [
        nnx.Linear(n, m, param_dtype=jnp.float64, rngs=nnx.Rngs(n + m))
        for n, m in [(2, 16), (16, 16), (16, 1)]
    ]
    model = nnx.Sequential(layers[0], jnp.tanh, layers[1], jnp.tanh, layers[2])
    rows = (cx.Residuals(equation, name="equation"), cx.Residuals(boundary, name="edge"))
    graph, start = nnx.split(model, nnx.Param)

    @jax.jit
    def train(radius):
        method = cx.NullSpace(momentum=0.9, trust=lambda _: radius, solver="gram")
        optimizer = cx.constrain(optax.identity(), rows, model=model, method=method)

        def step(carry, _):
            parameters, state = carry
            nothing = jax.tree.map(jnp.zeros_like, parameters)
            updates, state = optimizer.update(nothing, state, parameters, batch=batch)
            figures = state.constraints.trusted, optax.tree.norm(updates)
            return (optax.apply_updates(parameters, updates), state), figures

        carry = start, optimizer.init(start)
        (parameters, state), (trusted, lengths) = jax.lax.scan(step, carry, length=100)
        x = jax.random.uniform(keys[2], (500, 2))
        error = nnx.merge(graph, parameters)(x) - solution(x)
        reports = cx.reports(state)
        edge_violation = reports["edge"].violation
        error = jnp.linalg.norm(error) / jnp.linalg.norm(solution(x))
        return error, edge_violation, trusted, lengths

    error, violation, trusted, lengths = train(0.5)
    assert error < 1e-3
    assert violation < 1e-3
    assert np.max(lengths) < 0.5 * (1 + 1e-6)
    assert trusted[0] < 0.5
    assert trusted[-1] == 1
    uncapped, *_, lengths = train(1e9)
    assert not uncapped < 0.1
    assert not np.max(lengths) < 10


def test_momentum_and_trust_agree_with_dense_solves(x64):
    """Hard rows beside soft ones, and a loss beside both: only what rows change is remembered."""
    rng = np.random.default_rng(0)
    A, B = rng.normal(size=(4, 9)), rng.normal(size=(2, 9))
    a, b, gradient = rng.normal(size=4), rng.normal(size=2), rng.normal(size=9)
    constraints = Composed(
        (
            Member("soft", lambda p, *_: A @ p - a, 1.0, damping=0.3, placement="update"),
            Member("hard", lambda p, *_: B @ p - b, 0.5, placement="update"),
        )
    )
    method = cx.NullSpace(momentum=0.8, trust=0.9)
    optimizer = cx.constrain(optax.sgd(0.01), constraints, method=method)
    p = jnp.asarray(rng.normal(size=9))
    state = optimizer.init(p)
    step = jax.jit(optimizer.update)
    J = np.concatenate([A, B])
    M = np.diag(np.repeat([0.3 * np.mean(np.sum(A**2, 1)), 0.0], [4, 2]))
    q, memory, parts = np.asarray(p), np.zeros(9), []
    for _ in range(9):
        updates, state = step(jnp.asarray(gradient), state, p)
        p = optax.apply_updates(p, updates)
        target = np.concatenate([A @ q - a, 0.5 * (B @ q - b)])
        u = -0.01 * gradient + 0.8 * memory
        u = u - J.T @ np.linalg.solve(J @ J.T + M, J @ u + target)
        memory = u + 0.01 * gradient
        parts.append(min(1, 0.9 / np.linalg.norm(u)))
        q = q + parts[-1] * u
        np.testing.assert_allclose(p, q, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(state.constraints.trusted, parts[-1], rtol=1e-6)
    assert parts[0] < 1 == parts[-1]


def test_momentum_rests_where_no_row_acts():
    zero = Member("zero", lambda p, *_: p[:1], 0.1, every=2, placement="update")
    optimizer = cx.constrain(optax.identity(), Composed((zero,)), method=cx.NullSpace(momentum=0.9))
    p = jnp.array([1.0, 1.0])
    state = optimizer.init(p)
    lengths = []
    for _ in range(2):
        updates, state = optimizer.update(jnp.zeros(2), state, p)
        lengths.append(float(optax.tree.norm(updates)))
    np.testing.assert_allclose(lengths, [0.1, 0.0], rtol=1e-6)


def test_a_trainer_without_a_loss_is_driven_by_residuals():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3)).astype(np.float32)
    y = x @ np.array([[1.0], [-2.0], [0.5]], np.float32) + 0.3

    class Recorder(cx.Callback):
        logged = ()

        def on_log(self, step, metrics):
            self.logged = (*self.logged, metrics)

    recorder = Recorder()
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    trainer = cx.Trainer(
        model=model,
        loss=None,
        constraints=[cx.Residuals(lambda m, batch, key: m(batch["x"]) - batch["y"], name="fit")],
        method=cx.NullSpace(momentum=0.5, trust=0.5),
        optimizer=optax.identity(),
        data=cx.data.arrays({"x": x, "y": y}, batch=16),
        steps=30,
        devices=1,
        logging=cx.Logging(every=1, progress=False, callbacks=[recorder]),
    )
    result = trainer.fit()
    np.testing.assert_allclose(result.model.kernel[...].ravel(), [1, -2, 0.5], atol=1e-3)
    first, last = recorder.logged[0], recorder.logged[-1]
    np.testing.assert_allclose(first["loss"], first["constraints/fit/violation"] ** 2, rtol=1e-5)
    assert first["constraints/trusted"] < 1 == last["constraints/trusted"]
    assert trainer.diagnose() is not None


def test_a_trainer_without_a_loss_needs_constraints():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    data = cx.data.arrays({"x": np.zeros((8, 1), np.float32)}, batch=8)
    with pytest.raises(ArgumentError, match=r"Trainer\(loss=None\).*Residuals"):
        cx.Trainer(model=model, loss=None, optimizer=optax.identity(), data=data, steps=1)


@pytest.mark.parametrize(
    "settings", [{"momentum": 1.0}, {"momentum": -0.1}, {"trust": 0.0}, {"trust": -1.0}]
)
def test_settings_that_are_not_allowed_are_refused(settings):
    (name,) = settings
    with pytest.raises(ArgumentError, match=rf"NullSpace\({name}=\.\.\.\)"):
        cx.NullSpace(**settings)


def test_a_trust_region_of_no_size_stops_the_run():
    row = Member("row", lambda p, *_: p[:1], 1.0)
    method = cx.NullSpace(trust=lambda _: 0.0)
    optimizer = cx.constrain(optax.sgd(0.1), Composed((row,)), method=method)
    p = jnp.ones(2)
    updates, _ = optimizer.update(jnp.ones(2), optimizer.init(p), p)
    assert np.isnan(updates).all()


def test_momentum_needs_a_row_on_updates():
    row = Member("row", lambda p, *_: p[:1], 1.0, placement="gradient")
    optimizer = cx.constrain(optax.sgd(0.1), Composed((row,)), method=cx.NullSpace(momentum=0.9))
    p = jnp.ones(2)
    with pytest.raises(ArgumentError, match=r"'row'.*projected in the gradient"):
        optimizer.update(jnp.ones(2), optimizer.init(p), p)


def test_residuals_need_a_function():
    with pytest.raises(ArgumentTypeError, match=r"Residuals\(of=\.\.\.\)"):
        cx.Residuals(3.0)
