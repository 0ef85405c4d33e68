"""`Unchanged`: outputs at given points stay what they were."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx


class Network(nnx.Module):
    """Two outputs of three inputs."""

    def __init__(self, dtype=jnp.float32, width=12):
        settings = {"param_dtype": dtype, "rngs": nnx.Rngs(0)}
        self.first = nnx.Linear(3, width, **settings)
        self.last = nnx.Linear(width, 2, **settings)

    def features(self, x):
        return jnp.tanh(self.first(x))

    def __call__(self, x):
        return self.last(self.features(x))


def draw(count, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, 3)))


def flatten(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def differentiate(rows, parameters, x):
    """The Jacobian of rows as a dense matrix."""
    found = jax.tree.leaves(jax.jit(jax.jacobian(rows))(parameters, x))
    return np.concatenate([np.reshape(leaf, (len(leaf), -1)) for leaf in found], axis=1)


def test_a_step_holds_some_points_and_others_softly(x64):
    """Two constraints in one step agree with a dense solve; one may move the last layer alone."""
    model = Network(jnp.float64)
    hard, soft = draw(5, 1), draw(4, 2)
    constraints = cx.compose(
        cx.Unchanged(model, hard, name="hard"),
        cx.Unchanged(jnp.zeros((4, 2)), soft, gamma=0.5, damping=0.2, name="soft"),
        model=model,
    )
    parameters = nnx.as_pure(nnx.state(model, nnx.Param))
    graph = nnx.graphdef(model)
    rng = np.random.default_rng(0)
    update = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), parameters)

    @jax.jit
    def project(update, parameters):
        # Rows of their own examples are solved exactly, without being told to.
        return cx.project(update, constraints, parameters, model=model)

    found = project(update, parameters)

    def rows(p, x):
        return nnx.merge(graph, p)(x).ravel()

    J = [differentiate(rows, parameters, x) for x in (hard, soft)]
    m = np.concatenate([np.zeros(10), np.full(8, 0.2 * np.mean(np.sum(J[1] ** 2, 1)))])
    J = np.concatenate(J)
    c = np.concatenate([np.zeros(10), 0.5 * np.asarray(rows(parameters, soft))])
    wanted = flatten(update) - J.T @ np.linalg.solve(J @ J.T + np.diag(m), J @ flatten(update) + c)
    np.testing.assert_allclose(flatten(found.update), wanted, atol=1e-9)
    assert found.reports["hard"].resolved


@pytest.mark.parametrize("of", [None, lambda model, x: model.features(x)])
def test_outputs_stay_while_the_rest_learns(of):
    model = Network(width=48)
    points, x = draw(4).astype(jnp.float32), draw(16, 5).astype(jnp.float32)
    kept = cx.Unchanged(model, points, of=of, gamma=1.0)
    seen = kept.of or (lambda model, x: model(x))
    before = seen(model, points)
    target = jnp.ones((16, 2))

    def learn(optimizer):
        graph, start = nnx.split(nnx.clone(model))

        def loss(p):
            return jnp.mean((nnx.merge(graph, p)(x) - target) ** 2)

        def step(carry, _):
            p, state = carry
            updates, state = optimizer.update(jax.grad(loss)(p), state, p)
            return (optax.apply_updates(p, updates), state), None

        (p, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), length=60)
        return float(loss(p)), float(jnp.abs(seen(nnx.merge(graph, p), points) - before).max())

    start = float(jnp.mean((model(x) - target) ** 2))
    constrained = cx.constrain(
        optax.adam(1e-2), kept, model=model, method=cx.NullSpace(solver="gram")
    )
    (plain, moved), (learnt, held) = learn(optax.adam(1e-2)), learn(constrained)
    assert moved > 0.1
    assert held < 1e-3
    assert learnt < 0.5 * start
    assert plain < learnt


def test_points_of_a_batch_are_compared_with_a_model_as_it_was():
    model = Network()
    constraint = cx.Unchanged(model, "x")
    batch = {"x": draw(6).astype(jnp.float32)}
    before = model(batch["x"])
    model.last.bias[...] += 0.5
    key = jax.random.key(0)
    np.testing.assert_allclose(constraint.residual(model, batch, key=key), 0.5, atol=1e-6)
    named = cx.Unchanged("outputs", "x")
    batch["outputs"] = before
    np.testing.assert_allclose(named.residual(model, batch, key=key), 0.5, atol=1e-6)
    np.testing.assert_allclose(named.violation(model, batch, key), 0.5, atol=1e-6)
    np.testing.assert_allclose(named.scale(model, batch, key), np.sqrt(np.mean(before**2)), 1e-6)


def test_a_step_looks_at_points_drawn_anew_and_reports_all():
    model = Network()
    points = draw(9).astype(jnp.float32)
    changes = jnp.arange(9.0)[:, None] * jnp.ones(2)
    constraint = cx.Unchanged(model(points) - changes, points, examples=4)
    composed = cx.compose(constraint, model=model)
    parameters = nnx.state(model, nnx.Param)
    (first,), (second,) = (
        composed(parameters, key=jax.random.key(k), model=model).values() for k in (0, 1)
    )
    for rows in (first, second):
        assert rows.shape == (8,)
        assert len(set(np.round(np.asarray(rows)[::2]).tolist())) == 4
    assert not np.allclose(first, second)
    violation = constraint.violation(model, None, jax.random.key(0))
    np.testing.assert_allclose(violation, np.sqrt(np.mean(np.arange(9.0) ** 2)), rtol=1e-5)


def test_points_come_from_a_memory_in_the_model():
    model = Network()
    model.memory = cx.data.Memory(8, only="ready", x=jnp.zeros(3), y=jnp.zeros(2), ready=0.0)
    constraint = cx.Unchanged("y", "x", memory=lambda model: model.memory, examples=4)
    key = jax.random.key(0)
    x = draw(3).astype(jnp.float32)
    model.memory.add(key, x=x, y=model(x) - 1, ready=jnp.array([1.0, 1.0, 0.0]))
    rows = cx.compose(constraint, model=model)(nnx.state(model, nnx.Param), model=model)
    # Two points are ready, and rows of places without a point are zero.
    np.testing.assert_allclose(sorted(rows["unchanged"]), [0] * 4 + [1] * 4, atol=1e-6)
    np.testing.assert_allclose(constraint.violation(model, None, key), 1, rtol=1e-6)


def test_a_diagnosis_tells_how_many_directions_are_held(x64):
    model = Network(jnp.float64)
    points = draw(6, 3)
    hard = cx.Unchanged(model, points, name="hard")
    soft = cx.Unchanged(model, points, damping=0.5, name="soft")
    found = cx.diagnose(model, [hard, soft])
    assert found["hard"].directions == found["hard"].rank == found["soft"].rank == 12
    graph, parameters = nnx.split(model)
    J = differentiate(lambda p, x: nnx.merge(graph, p)(x).ravel(), parameters, points)
    squares = np.linalg.eigvalsh(J @ J.T)
    wanted = np.sum(squares / (squares + 0.5 * np.mean(np.sum(J**2, 1))))
    np.testing.assert_allclose(found["soft"].directions, wanted, rtol=1e-8)
    assert f"the rows hold {wanted:.3g} of 12 directions" in " ".join(str(found).split())


def test_mistakes_are_named():
    points = jnp.zeros((4, 3))
    for arguments, message in (
        ((jnp.zeros((3, 2)), points), "an output for each point"),
        ((Network(), {"a": points, "b": points[:2]}), r"Unchanged\(points=...\)"),
        ((3.0, "x"), r"Unchanged\(reference=...\)"),
    ):
        with pytest.raises(cx.UserError, match=message):
            cx.Unchanged(*arguments)
    with pytest.raises(cx.UserError, match=r"Unchanged\(examples=5\).*4 points"):
        cx.Unchanged(Network(), points, examples=5)
    with pytest.raises(cx.UserError, match="looks up 'inputs' in the batch"):
        cx.Unchanged("y", "inputs").residual(Network(), {"x": points}, key=None)
    model = Network()
    changed = dataclasses.replace(cx.Unchanged(model, points), of=lambda model, x: model(x)[:, :1])
    with pytest.raises(cx.UserError, match=r"shape \(4, 1\).*shape \(4, 2\)"):
        changed.residual(model, None, key=None)
