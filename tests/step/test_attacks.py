"""Numbers that would be wrong without a word: steps and reports against plain references."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx.constraints import Composed, Member

_rng = np.random.default_rng(0)
MATRIX = jnp.asarray(_rng.normal(size=(6, 8)), jnp.float32)
BOUND = jnp.asarray(0.3 * _rng.normal(size=6), jnp.float32)
UPDATE = jnp.asarray(_rng.normal(size=8), jnp.float32)


def as_inequality(function, **settings):
    def rows(p, batch, key, model):
        return function(p)

    return Composed((Member("at-most", rows, 1.0, kind="inequality", **settings),))


@pytest.mark.parametrize("every", [1, 2])
def test_iterations_find_the_same_active_inequalities_inside_of_jit(every):
    at_most = as_inequality(lambda p: MATRIX @ p - BOUND, every=every)

    def step(update, solver):
        return cx.project(update, at_most, jnp.zeros(8), solver=solver).update

    exact = step(UPDATE, "gram")
    np.testing.assert_allclose(step(UPDATE, cx.LSMR(rtol=1e-6)), exact, atol=1e-4)
    compiled = jax.jit(lambda update: step(update, cx.LSMR(rtol=1e-6)))(UPDATE)
    np.testing.assert_allclose(compiled, exact, atol=1e-4)
