"""A constraint that may move some parameters alone still counts all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx


class Sum(cx.Constraint):
    """The sum of all outputs at fixed points."""

    def residual(self, model, batch, *, key):
        return jnp.sum(model(jnp.linspace(-1, 1, 8).reshape(4, 2)), axis=0) - 1.0


def is_bias(path, variable):
    return path[-1] == "bias"


def is_kernel(path, variable):
    return path[-1] == "kernel"


def flat_products(model, params, updates):
    def rows(params):
        return Sum().residual(nnx.merge(nnx.graphdef(model), params), None, key=None)

    return rows(params), jax.jvp(rows, (params,), (updates,))[1]


@pytest.mark.parametrize("solver", ["gram", cx.LSMR(rtol=1e-6)], ids=["gram", "lsmr"])
@pytest.mark.parametrize("placement", ["update", "twice"])
def test_the_step_obeys_with_all_parameters_and_moves_some(solver, placement):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = cx.constrain(
        optax.sgd(0.1),
        Sum(gamma=0.5, wrt=is_bias),
        model=model,
        method=cx.NullSpace(placement=placement, solver=solver),
    )
    params = nnx.state(model, nnx.Param)
    gradient = jax.tree.map(lambda leaf: jnp.cos(leaf) + leaf, params)
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)
    c, moved = flat_products(model, params, updates)
    np.testing.assert_allclose(moved, -0.5 * c, atol=2e-5)
    kernel = np.asarray(jax.tree.leaves(updates["kernel"])[0])
    np.testing.assert_array_equal(kernel, -0.1 * np.asarray(jax.tree.leaves(gradient["kernel"])[0]))


def test_training_with_biases_alone_keeps_the_constraint():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    constraint = Sum(gamma=0.5, wrt=is_bias)
    tx = cx.constrain(optax.sgd(0.01), constraint, model=model)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = jnp.cos(jnp.arange(16.0)).reshape(8, 2)

    @nnx.jit
    def step(model, optimizer):
        gradients = nnx.grad(lambda m: jnp.mean((m(x) - 3.0) ** 2))(model)
        optimizer.update(model, gradients)

    for _ in range(300):
        step(model, optimizer)
    assert float(jnp.max(jnp.abs(constraint.residual(model, None, key=None)))) < 1e-5


def test_constraints_that_differ_in_what_they_may_move_are_solved_together():
    """Rows that share parameters but not what they may move have an unsymmetric Gram matrix."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    class First(Sum):
        def residual(self, model, batch, *, key):
            return super().residual(model, batch, key=key)[0]

    class Norm(cx.Constraint):
        def residual(self, model, batch, *, key):
            return jnp.sum(model.kernel[...] ** 2) + jnp.sum(model.bias[...]) - 1.0

    optimizer = cx.constrain(
        optax.adam(0.1),
        (First(gamma=0.5, wrt=is_bias), Norm(gamma=0.5, wrt=is_kernel)),
        model=model,
    )
    params = nnx.state(model, nnx.Param)
    gradient = jax.tree.map(lambda leaf: jnp.cos(leaf) + leaf, params)
    updates, state = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)

    def rows(params):
        merged = nnx.merge(nnx.graphdef(model), params)
        return jnp.stack([c.residual(merged, None, key=None) for c in (First(), Norm())])

    _, moved = jax.jvp(rows, (params,), (updates,))
    np.testing.assert_allclose(moved, -0.5 * rows(params), atol=1e-5)
    assert all(bool(report.resolved) for report in cx.reports(state).values())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reads", ["kernel", "everything"])
def test_parameters_that_a_mask_hides_are_named_once(caplog, compiled, reads):
    """What another part of `optax.multi_transform` does to them is left out of J u."""

    class Squares(cx.Constraint):
        def residual(self, model, batch, *, key):
            arrays = [model.kernel[...]] if reads == "kernel" else [model.kernel, model.bias]
            return sum(jnp.sum(array[...] ** 2) for array in arrays) - 3.0

    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    cx.attach(model, Squares())
    parts = {"kernel": cx.constrain(optax.adam(0.1), model), "bias": optax.sgd(0.1)}
    tx = optax.multi_transform(parts, {name: name for name in parts})
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    update = jax.jit(tx.update) if compiled else tx.update
    state = tx.init(params)
    for _ in range(2):
        _, state = update(params, state, params, module=model)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (reads == "everything")
    assert all("'squares' depends on bias, which" in warning for warning in warnings)
