"""Penalty and augmented Lagrangian on the same constraints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import constrainx as cx

GOAL = jnp.array([2.0, 1.0])


def circle(p):
    return jnp.sum(p**2) - 1.0


def train(method, *, steps=3000, constraint=circle):
    optimizer = cx.constrain(optax.sgd(0.02), constraint, gamma=0.5, method=method)

    def step(carry, _):
        p, state = carry
        updates, state = optimizer.update(p - GOAL, state, p)
        return (optax.apply_updates(p, updates), state), None

    start = jnp.array([0.3, 0.8])
    return jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), length=steps)[0][0])()


def test_only_the_null_space_and_the_lagrangian_end_on_the_curve(x64):
    solution = GOAL / jnp.linalg.norm(GOAL)
    np.testing.assert_allclose(train("none"), GOAL, atol=1e-6)
    np.testing.assert_allclose(train("nullspace"), solution, atol=1e-6)
    np.testing.assert_allclose(train("lagrangian"), solution, atol=1e-3)
    violations = [abs(circle(train(cx.Penalty(w)))) for w in (0.3, 1.0, 3.0)]
    assert violations[0] > violations[1] > violations[2] > 1e-2


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_penalty_ends_at_the_minimiser_of_the_penalised_loss(x64, weight):
    p = train(cx.Penalty(weight))
    gradient = jax.grad(lambda p: 0.5 * jnp.sum((p - GOAL) ** 2) + 0.5 * weight * circle(p) ** 2)(p)
    np.testing.assert_allclose(gradient, 0, atol=1e-8)


def test_methods_respect_inequalities(x64):
    inside = cx.AtMost(4.0, of=lambda m, batch, key: jnp.sum(m**2))
    member = cx.compose(lambda p: jnp.sum(p**2) - 4.0).members[0]
    constraint = cx.Composed((type(member)(**{**vars(member), "kind": inside.kind}),))
    np.testing.assert_allclose(
        train("lagrangian", constraint=constraint), 2 * GOAL / jnp.linalg.norm(GOAL), atol=1e-3
    )
    far = cx.Composed(
        (type(member)(**{**vars(member), "kind": inside.kind,
                         "function": lambda p, *_: jnp.sum(p**2)[None] - 100.0}),)
    )  # fmt: skip
    for method in ("penalty", "lagrangian", "nullspace"):
        np.testing.assert_allclose(train(method, constraint=far), GOAL, atol=1e-6)
