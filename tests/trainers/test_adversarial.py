"""Attacks, against a classifier for which the worst point is known."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from constrainx.models import MLP
from constrainx.trainers.adversarial import Attack, losses

KEY = jax.random.key(0)


def problem():
    x = jax.random.uniform(jax.random.key(1), (32, 6))
    return MLP((6, 16, 3), rngs=nnx.Rngs(0)), x, jax.random.randint(KEY, (32,), 0, 3)


def test_an_attack_stays_in_the_box_and_in_range():
    model, x, y = problem()
    attacked = Attack(radius=0.2, steps=9, restarts=1)(model, x, y, KEY)
    assert jnp.abs(attacked - x).max() <= 0.2 + 1e-6
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    assert jnp.abs(attacked - x).max() > 0.1


def test_an_attack_finds_the_worst_point_of_a_linear_classifier():
    weights = jnp.array([[1.0, -1.0], [-2.0, 2.0], [0.5, -0.5]])
    x, y = jnp.full((1, 3), 0.5), jnp.array([0])
    attacked = Attack(radius=0.1, steps=8)(lambda x: x @ weights, x, y, KEY)
    # Down along the difference of the two rows of logits, into a corner of the box.
    np.testing.assert_allclose(attacked - x, [[-0.1, 0.1, -0.1]], atol=1e-6)


def test_more_steps_or_restarts_never_weaken_an_attack():
    model, x, y = problem()
    found = [
        losses(model, y)(attack(model, x, y, KEY))
        for attack in (
            Attack(radius=0.0),
            Attack(radius=0.2, steps=1),
            Attack(radius=0.2, steps=3),
            Attack(radius=0.2, steps=10),
            Attack(radius=0.2, steps=10, restarts=2),
        )
    ]
    np.testing.assert_array_equal(found[0], losses(model, y)(x))
    for weaker, stronger in itertools.pairwise(found):
        assert (stronger >= weaker - 1e-6).all()
    assert found[-1].mean() > found[0].mean() + 0.05


def test_no_gradient_passes_through_the_attack():
    model, x, y = problem()
    graph, params = nnx.split(model)
    attack = Attack(radius=0.2, steps=2)

    def shift(params):
        return jnp.sum(attack(nnx.merge(graph, params), x, y, KEY))

    assert all(not leaf.any() for leaf in jax.tree.leaves(jax.grad(shift)(params)))


def test_a_radius_below_zero_is_refused():
    with pytest.raises(ValueError, match="at least 0"):
        Attack(radius=-0.1)
