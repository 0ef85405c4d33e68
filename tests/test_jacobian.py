"""Rows of Jacobians, stored or factored, against the dense Jacobian."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

from constrainx import jacobian
from constrainx.models import MLP


class Convolutional(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.head = nnx.Linear(4 * 16, 8, rngs=rngs)

    def __call__(self, x):
        x = self.norm(nnx.relu(self.conv(x.reshape(-1, 4, 4, 1))))
        return self.head(x.reshape(x.shape[0], -1))


class Tied(nnx.Module):
    """One kernel as a dense layer and in another role, which cannot be factored."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs(), (16, 16)) / 4)

    def __call__(self, x):
        return jnp.tanh(x @ self.kernel[...]) @ self.kernel[...].T


def network(name):
    rngs = nnx.Rngs(0)
    return {
        "mlp": lambda: MLP((16, 48, 48, 8), rngs=rngs),
        "convolutional": lambda: Convolutional(rngs),
        "tied": lambda: Tied(rngs),
    }[name]()


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("name", ["mlp", "convolutional", "tied"])
def test_rows_of_slices(x64, name, rows):
    graph, params = nnx.split(network(name))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)))
    flip = x[:, ::-1]

    def row(params, piece):
        # The network twice, as every equivariance has it.
        first, second = piece
        model = nnx.merge(graph, params)
        return jnp.sqrt(jnp.mean((model(first) - 2 * model(second)) ** 2))

    slices = jax.tree.map(lambda leaf: leaf.reshape(rows, 16 // rows, 16), (x, flip))
    flat, unravel = ravel_pytree(params)
    dense = jax.jacobian(lambda p: jax.vmap(lambda s: row(unravel(p), s))(slices))(flat)
    J = jax.jit(lambda p: jacobian.rows_of_slices(row, p, slices))(params)
    direction = jax.tree.map(jnp.cos, params)
    weights = jnp.arange(1.0, rows + 1)
    metric = jax.tree.map(lambda leaf: jnp.exp(leaf), params)
    flat_metric = ravel_pytree(metric)[0]

    np.testing.assert_allclose(J.values, jax.vmap(lambda s: row(params, s))(slices), rtol=1e-12)
    np.testing.assert_allclose(J.gram(), dense @ dense.T, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(
        J.gram(metric), (dense * flat_metric) @ dense.T, rtol=1e-10, atol=1e-14
    )
    np.testing.assert_allclose(J.matvec(direction), dense @ ravel_pytree(direction)[0], rtol=1e-10)
    np.testing.assert_allclose(ravel_pytree(J.rmatvec(weights))[0], weights @ dense, atol=1e-12)
    both = jacobian.stacked([J, jacobian.rows_of(lambda p: 3 * J.matvec(p), params)])
    np.testing.assert_allclose(
        both.gram()[:rows, rows:], 3 * dense @ dense.T, rtol=1e-9, atol=1e-13
    )


def test_dense_layers_are_factored_where_it_pays():
    graph, params = nnx.split(MLP((16, 64, 64, 8), rngs=nnx.Rngs(0)))
    slices = jnp.ones((32, 1, 16))
    J = jacobian.rows_of_slices(lambda p, s: jnp.sum(nnx.merge(graph, p)(s)), params, slices)
    kernels = [b for b in J.blocks if isinstance(b, jacobian.Factored)]
    assert len(kernels) == 3
    assert kernels[0].activations.shape == (32, 1, 16)
    one_row = jacobian.rows_of_slices(
        lambda p, s: jnp.sum(nnx.merge(graph, p)(s)), params, jnp.ones((1, 256, 16))
    )
    assert not any(isinstance(b, jacobian.Factored) for b in one_row.blocks)
    stored = [b.gradients.size for b in J.blocks if isinstance(b, jacobian.Stored)]
    assert max(stored) < 32 * 64 * 16
