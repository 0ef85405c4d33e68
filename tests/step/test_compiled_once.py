"""In a loop of one's own, the step is compiled once."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import constrainx as cx

X = jnp.ones((4, 3))


class Even(cx.Constraint):
    def residual(self, model, batch, *, key):
        return model(batch["x"]) - model(-batch["x"])


def unit_norm(model):
    kernel = model.layers[0].kernel[...]
    return jnp.sum(kernel * kernel) - 1


def make_net():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), jnp.tanh, nnx.Linear(4, 2, rngs=rngs))


def add_masks(model):
    cx.masks.add_masks(model)
    return cx.MaskBudget(0.5)


CASES = {
    "rows-of-the-batch": (lambda model: Even(), "nullspace"),
    "rows-in-some-steps": (lambda model: Even(start=1, every=2), "nullspace"),
    "masks": (add_masks, "nullspace"),
    "penalty": (lambda model: Even(), "penalty"),
    "lagrangian": (lambda model: Even(), "lagrangian"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_second_step_does_not_compile_again(case):
    prepare, method = CASES[case]
    model = make_net()
    tx = cx.constrain(optax.adam(1e-2), prepare(model), model=model, method=method)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    traced = []

    @nnx.jit
    def step(model, optimizer, key):
        traced.append(key)
        gradients = nnx.grad(lambda model: jnp.mean(model(X) ** 2))(model)
        optimizer.update(model, gradients, batch={"x": X}, key=key, module=model)

    for number in range(3):
        step(model, optimizer, jax.random.key(number))
    assert len(traced) == 1
