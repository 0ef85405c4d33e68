"""Rows of Jacobians, stored or factored, against the dense Jacobian."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

from constrainx.models import MLP
from constrainx.step import _blocks as blocks
from constrainx.step import _jacobian as jacobian
from constrainx.step import _patches as patches


class Convolutional(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, (3, 2), rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.strided = nnx.Conv(
            4, 3, (2, 2), strides=(2, 1), kernel_dilation=(1, 2), padding="VALID", rngs=rngs
        )
        self.head = nnx.Linear(3 * 2 * 2, 8, rngs=rngs)

    def __call__(self, x):
        x = self.norm(nnx.relu(self.conv(x.reshape(-1, 4, 4, 1))))
        x = self.strided(x)
        return self.head(x.reshape(x.shape[0], -1))


class Tied(nnx.Module):
    """Uses one kernel as a dense layer and in another way, which cannot be factored."""

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
def test_rows_of_slices_match_the_dense_jacobian(x64, name, rows):
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
    rows_alone = jax.jit(lambda p: jacobian.rows_of_slices(row, p, slices))(params)
    J = jacobian.StackedJacobian((rows_alone,))
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
    np.testing.assert_allclose(
        ravel_pytree(J.rmatvec(weights, params))[0], weights @ dense, atol=1e-12
    )
    stored = jacobian.rows_of(lambda p: 3 * J.matvec(p), params)
    both = jacobian.StackedJacobian((rows_alone, stored))
    np.testing.assert_allclose(
        both.gram()[:rows, rows:], 3 * dense @ dense.T, rtol=1e-9, atol=1e-13
    )


def test_dense_layers_are_factored_where_it_pays():
    graph, params = nnx.split(MLP((16, 64, 64, 8), rngs=nnx.Rngs(0)))
    slices = jnp.ones((32, 1, 16))
    J = jacobian.rows_of_slices(lambda p, s: jnp.sum(nnx.merge(graph, p)(s)), params, slices)
    kernels = [b for b in J.blocks if isinstance(b, blocks.Factored)]
    assert len(kernels) == 3
    assert kernels[0].activations.shape == (32, 1, 16)
    one_row = jacobian.rows_of_slices(
        lambda p, s: jnp.sum(nnx.merge(graph, p)(s)), params, jnp.ones((1, 256, 16))
    )
    assert not any(isinstance(b, blocks.Factored) for b in one_row.blocks)
    stored = [b.gradients.size for b in J.blocks if isinstance(b, blocks.Stored)]
    assert max(stored) < 32 * 64 * 16


def test_convolutions_are_products_with_patches():
    graph, params = nnx.split(Convolutional(nnx.Rngs(0)))
    slices = jnp.ones((8, 1, 16))

    def rows(p):
        return jacobian.rows_of_slices(lambda p, s: jnp.sum(nnx.merge(graph, p)(s)), p, slices)

    # A grouped convolution is what JAX makes of a kernel's gradient for each row.
    assert "feature_group_count=8" not in str(jax.make_jaxpr(rows)(params))
    assert "batch_group_count=8" not in str(jax.make_jaxpr(rows)(params))


@pytest.mark.parametrize("layout", [("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC")])
def test_kernel_gradients_are_right_in_any_layout(layout):
    rng = np.random.default_rng(0)
    shapes = {
        "NCHW": (2, 3, 7, 6),
        "NHWC": (2, 7, 6, 3),
        "OIHW": (4, 3, 2, 3),
        "HWIO": (2, 3, 3, 4),
    }
    x, kernel = (jnp.asarray(rng.normal(size=shapes[name]), jnp.float32) for name in layout[:2])
    geometry = {"strides": (2, 1), "padding": ((1, 2), (0, -1)), "dilation": (1, 2)}

    def convolve(kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, geometry["strides"], geometry["padding"],
            rhs_dilation=geometry["dilation"], dimension_numbers=layout,
        )  # fmt: skip

    output, pullback = jax.vjp(convolve, kernel)
    signals = jnp.asarray(rng.normal(size=output.shape), jnp.float32)
    numbers = jax.lax.conv_dimension_numbers(x.shape, kernel.shape, layout)
    found = patches.kernel_gradients(
        x, jnp.stack([signals, jnp.sin(signals)]), kernel=kernel.shape, layout=numbers, **geometry
    )
    wanted = jnp.stack([pullback(signals)[0], pullback(jnp.sin(signals))[0]])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [2, 4])
def test_convolutions_with_groups_on_a_mesh(groups):
    """JAX cannot batch the gradient of their kernels there, and a trainer places all on a mesh."""
    model = nnx.Conv(4, 4, (3, 3), feature_group_count=groups, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    images = jax.random.normal(jax.random.key(1), (3, 5, 5, 4))

    def row(params, piece):
        return jnp.sum(jnp.sin(nnx.merge(graph, params)(piece)))

    def rows(params):
        return jax.vmap(row, in_axes=(None, 0))(params, images)

    flat, unravel = ravel_pytree(params)
    dense = jax.jacobian(lambda flat: rows(unravel(flat)))(flat)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.P()))
    for find in (
        lambda params: jacobian.rows_of(rows, params),
        lambda params: jacobian.rows_of_slices(row, params, images),
    ):
        J = jacobian.StackedJacobian((jax.jit(find)(placed),))
        np.testing.assert_allclose(J.materialise(params), dense, rtol=2e-5, atol=1e-5)
