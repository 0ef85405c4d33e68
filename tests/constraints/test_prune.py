"""Pruning while training: phases, budgets, patterns, and what is left in the end."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx import masks
from constrainx.errors import ArgumentError

STEPS = 60


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.second = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.tanh(self.first(x)))


def make_step(graph, look):
    """A step as a function of the state; the targets need 8 of the 192 weights at most."""

    @jax.jit
    def step(state, number):
        model, opt = nnx.merge(graph, state)
        key = jax.random.key(number)
        x = jax.random.normal(key, (32, 8))

        def loss(model):
            return jnp.mean(jnp.square(look(model, key)(x) - jnp.tanh(x[:, :4])))

        opt.update(model, nnx.grad(loss)(model))
        return nnx.state((model, opt))

    return step


def train(phases, *, look=lambda m, key: masks.top(m), optimizer=None, steps=STEPS, **options):
    model = Net(nnx.Rngs(0))
    rate = 1e-2
    inner = optimizer or optax.adam(rate)
    pruned = cx.prune(model, inner, phases, learning_rate=rate, **options)
    if cx.constraints_of(model):
        pruned = cx.constrain(pruned, model)
    opt = nnx.Optimizer(model, pruned, wrt=nnx.Param)
    graph, state = nnx.split((model, opt))
    step = make_step(graph, look)
    seen = []
    for number in range(steps):
        state = step(state, number)
        trained, _ = nnx.merge(graph, state)
        seen.append(float(masks.expected_density(trained)))
    return trained, np.array(seen)


@pytest.mark.parametrize("rule", ["learned", "magnitude"])
def test_density_follows_the_phases_and_ends_exactly_at_its_target(rule):
    phases = masks.Phases(density=0.25, steps=STEPS)
    model, seen = train(phases, rule=rule, every=2)
    np.testing.assert_array_equal(seen[: phases.first], 1.0)
    wanted = np.array([float(phases.target(step + 1)) for step in range(STEPS)])
    # A weight that is certain to stay does not answer to the budget at once, so that the density
    # lags behind where the schedule is steep.
    assert np.abs(seen - wanted)[phases.first : phases.last].max() < 0.2
    assert np.abs(seen - wanted)[phases.last - 1] < 0.03
    np.testing.assert_allclose(seen[phases.last :], 48 / 192, atol=1e-6)
    assert float(masks.realised_density(masks.export(model))) == 48 / 192
    # Frozen masks leave nothing to chance.
    draw = masks.realised_density(model, jax.random.key(0))
    assert float(draw) == 48 / 192


def test_draws_and_the_most_probable_weights_both_work():
    phases = masks.Phases(density=0.25, steps=STEPS)
    model, seen = train(phases, look=masks.sample)
    assert float(masks.realised_density(masks.export(model))) == seen[-1] == 0.25


def test_masks_are_kept_once_they_are_frozen():
    phases = masks.Phases(density=0.25, steps=STEPS)
    early, _ = train(phases, steps=phases.last + 1)
    late, _ = train(phases)
    for one, other in zip(masks.probabilities(early), masks.probabilities(late), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(early.first.kernel[...], late.first.kernel[...])


def test_probabilities_start_from_the_weights_in_the_metric_of_the_optimizer():
    phases = masks.Phases(density=0.25, steps=STEPS)
    model, _ = train(phases, steps=phases.first + 1)
    kernel = np.concatenate([np.ravel(model.first.kernel[...]), np.ravel(model.second.kernel[...])])
    p = np.concatenate([np.ravel(q) for q in masks.probabilities(model)])
    # The 48th largest is at ten, up to the step between two numbers of the sample.
    assert np.sort(p)[::-1][47] == pytest.approx(10, rel=1e-4)
    ratio = p / kernel**2
    assert ratio.min() > 0
    assert ratio.max() / ratio.min() > 1.1  # not magnitude alone


def test_without_second_moments_it_is_magnitude():
    phases = masks.Phases(density=0.25, steps=STEPS)
    optimizer = optax.sgd(1e-2, momentum=0.9)
    model, _ = train(phases, optimizer=optimizer, steps=phases.first + 1)
    p = [q / model.first.kernel[...] ** 2 for q in masks.probabilities(model)[:1]]
    np.testing.assert_allclose(p[0], p[0][0, 0], rtol=1e-4)


@pytest.mark.parametrize("rule", ["learned", "magnitude"])
def test_a_pattern_ends_with_exactly_two_of_four(rule):
    phases = masks.Phases(density=0.5, steps=STEPS)
    model, _ = train(phases, rule=rule, pattern="2:4", every=2)
    for kernel in (masks.export(model).first.kernel, masks.export(model).second.kernel):
        groups = np.asarray(kernel[...]).reshape(-1, 4, kernel.shape[-1])
        np.testing.assert_array_equal((groups != 0).sum(axis=1), 2)


def test_a_pattern_and_another_density_contradict_each_other():
    with pytest.raises(ArgumentError, match=r"0\.5"):
        train(masks.Phases(density=0.25, steps=STEPS), pattern="2:4", steps=0)


def test_layers_that_cannot_be_cut_in_groups_are_left_out(caplog):
    model = nnx.Sequential(nnx.Linear(3, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    with caplog.at_level("INFO", logger="constrainx"):
        masks.add_masks(model, pattern="2:4")
    assert [path for path, _ in masks.find_probabilities(model)] == [("layers", 1, "kernel_mask")]
    assert "layers.0.kernel" in caplog.text


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
        lambda tx: optax.apply_if_finite(tx, 3),
        lambda tx: optax.MultiSteps(tx, 1),
    ],
    ids=["chain", "apply_if_finite", "MultiSteps"],
)
def test_it_works_inside_of_other_transformations(wrap):
    model = Net(nnx.Rngs(0))
    phases = masks.Phases(density=0.25, steps=20)
    pruned = cx.constrain(cx.prune(model, optax.adam(1e-2), phases, learning_rate=1e-2), model)
    opt = nnx.Optimizer(model, wrap(pruned), wrt=nnx.Param)
    graph, state = nnx.split((model, opt))
    step = make_step(graph, lambda m, key: masks.top(m))
    for number in range(20):
        state = step(state, number)
    trained, _ = nnx.merge(graph, state)
    assert float(masks.realised_density(masks.export(trained))) == 0.25


def split_optimizer(first, second):
    """One optimizer for the first layer, another for the second."""
    return optax.multi_transform(
        {"a": first, "b": second},
        lambda tree: jax.tree_util.tree_map_with_path(
            lambda path, _: "a" if "first" in str(path[0]) else "b", tree
        ),
    )


def take_constant_steps(optimizer, phases, steps):
    """The parameters after steps whose gradients are a function of the parameters alone."""
    model = Net(nnx.Rngs(0))
    pruned = cx.prune(model, optimizer, phases, learning_rate=1e-2)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    constrained = cx.constrain(pruned, model)
    state = constrained.init(params)

    @jax.jit
    def step(params, state):
        gradients = jax.tree.map(lambda p: 0.1 * p + 0.01, params)
        updates, state = constrained.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    nnx.update(model, params)
    return model


def test_weights_may_have_several_optimizers():
    phases = masks.Phases(density=0.25, steps=20)
    model = take_constant_steps(split_optimizer(optax.adam(1e-2), optax.sgd(1e-2)), phases, 20)
    assert float(masks.realised_density(masks.export(model))) == 0.25


def test_two_optimizers_with_second_moments_are_as_good_as_one():
    phases = masks.Phases(density=0.25, steps=20)
    one, two = (
        take_constant_steps(optimizer, phases, phases.first + 1)
        for optimizer in (optax.adam(1e-2), split_optimizer(optax.adam(1e-2), optax.adam(1e-2)))
    )
    for a, b in zip(masks.probabilities(one), masks.probabilities(two), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"density": 0.0}, "above 0"),
        ({"density": 0.1, "begin": 0.8}, "begin before it freezes"),
        ({"density": 0.1, "freeze": 1.0}, "no step"),
        ({"density": 0.1, "freeze": 100}, "no step"),
    ],
)
def test_phases_that_cannot_be_are_refused(options, says):
    with pytest.raises(ArgumentError, match=says):
        masks.Phases(steps=100, **options)


def test_an_optimizer_without_the_masks_is_refused():
    model = Net(nnx.Rngs(0))
    bare = nnx.as_pure(nnx.state(Net(nnx.Rngs(0)), nnx.Param))
    phases = masks.Phases(density=0.25, steps=20)
    pruned = cx.prune(model, optax.adam(1e-2), phases, learning_rate=1e-2)
    with pytest.raises(ArgumentError, match=r"first\.kernel_mask"):
        pruned.init(bare)


# Budgets.


def masked_net(initial):
    model = masks.add_masks(Net(nnx.Rngs(0)), initial=0.5)
    rng = np.random.default_rng(0)
    for _, p in masks.find_probabilities(model):
        p[...] = jnp.asarray(initial(rng, p.shape).astype(np.float32))
    return model


def uniform(rng, shape):
    return rng.uniform(-0.3, 1.4, shape)


@pytest.mark.parametrize("per", ["model", "layer"])
def test_the_closed_form_of_a_budget_is_the_step_of_its_rows(per):
    model = masked_net(uniform)
    budget = cx.MaskBudget(0.3, per=per, gamma=0.7, placement="update")
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    gradients = jax.tree.map(lambda p: jnp.sin(7 * p), params)

    def update(solver):
        optimizer = cx.constrain(
            optax.sgd(0.1), budget, model=model, method=cx.NullSpace(solver=solver)
        )
        return jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])(gradients, params)

    closed, rows = update("auto"), update("gram")
    for one, other in zip(jax.tree.leaves(closed), jax.tree.leaves(rows), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_a_budget_for_each_layer_is_met_in_each():
    model = masked_net(uniform)
    for _ in range(30):
        cx.MaskBudget(0.3, per="layer").nearest(model)
    for p in masks.probabilities(model):
        np.testing.assert_allclose(np.clip(p, 0, 1).mean(), 0.3, atol=1e-6)


def test_groups_of_layers_have_their_own_budgets():
    model = masked_net(uniform)
    first = cx.MaskBudget(0.2, where=lambda path, _: "first" in path, name="first", gamma=1.0)
    second = cx.MaskBudget(0.6, where=lambda path, _: "second" in path, name="second", gamma=1.0)
    optimizer = cx.constrain(optax.sgd(0.0), (first, second), model=model)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    state = optimizer.init(params)
    step = jax.jit(optimizer.update)
    for _ in range(20):
        updates, state = step(jax.tree.map(jnp.zeros_like, params), state, params)
        params = optax.apply_updates(params, updates)
    for name, target in (("first", 0.2), ("second", 0.6)):
        np.testing.assert_allclose(
            np.clip(params[name]["kernel_mask"], 0, 1).mean(), target, atol=1e-5
        )
    assert all(report.violation < 1e-5 for report in cx.reports(state).values())


def test_a_schedule_of_the_target_is_followed_and_its_end_is_what_counts_afterwards():
    model = masked_net(lambda rng, shape: rng.uniform(0.4, 0.6, shape))
    budget = cx.MaskBudget(optax.linear_schedule(0.5, 0.3, 10), gamma=1.0)
    optimizer = cx.constrain(optax.sgd(0.0), budget, model=model)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    state = optimizer.init(params)
    for number in range(12):
        updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
        params = optax.apply_updates(params, updates)
        nnx.update(model, params)
        wanted = max(0.5 - 0.02 * (number + 1), 0.3)
        np.testing.assert_allclose(masks.expected_density(model), wanted, atol=1e-6)
    np.testing.assert_allclose(budget.violation(model, None, jax.random.key(0)), 0, atol=1e-6)


def test_budgets_leave_an_exported_model():
    model = masked_net(uniform)
    cx.attach(model, cx.MaskBudget(0.2, where=lambda path, _: "first" in path))
    assert not cx.constraints_of(masks.export(model))


def test_a_function_may_depend_on_the_step():
    optimizer = cx.constrain(optax.sgd(0.0), lambda p, step: p - 1.0 - step, gamma=1.0)
    p = jnp.zeros(1)
    state = optimizer.init(p)
    for number in range(3):
        update, state = optimizer.update(jnp.zeros(1), state, p)
        p = p + update
        np.testing.assert_allclose(p, 1.0 + number, atol=1e-6)


def test_a_constraint_does_not_act_from_its_stop_on():
    class One(cx.Constraint):
        def residual(self, model, batch, *, key):
            del batch, key
            return model.kernel[...] - 1.0

    model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    optimizer = cx.constrain(optax.sgd(1.0), One(gamma=1.0, start=1, stop=2), model=model)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    state = optimizer.init(params)
    seen = []
    for _ in range(3):
        gradients = jax.tree.map(jnp.ones_like, params)
        updates, state = optimizer.update(gradients, state, params)
        seen.append(float(params["kernel"][0, 0] + updates["kernel"][0, 0]))
        params = optax.apply_updates(params, updates)
    assert seen[1] == pytest.approx(1.0, abs=1e-6)
    assert seen[2] == pytest.approx(0.0, abs=1e-6)
