"""Bounds on spectral norms, against NumPy's singular values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import constrainx as cx
from constrainx.constraints._singular_values import (
    clip_singular_values,
    largest_singular_values,
    spectral_norm,
)


def clip(matrix, bound):
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return (left * np.minimum(values, bound)[..., None, :]) @ right


@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 6)])
def test_singular_values_are_those_of_numpy(shape, x64):
    rng = np.random.default_rng(0)
    matrix, direction = rng.normal(size=shape), rng.normal(size=shape)
    exact = np.linalg.svd(matrix, compute_uv=False)
    np.testing.assert_allclose(spectral_norm(jnp.asarray(matrix)), exact[..., 0], rtol=1e-13)
    values = jax.jit(lambda m: largest_singular_values(m, 2, 60))(jnp.asarray(matrix))
    np.testing.assert_allclose(values, exact[..., :2], rtol=1e-12)
    bound = jnp.full(shape[:-2], 1.2)
    found, slope = jax.jit(
        lambda m, t: jax.jvp(clip_singular_values, (m, bound), (t, 0.3 * bound))
    )(jnp.asarray(matrix), jnp.asarray(direction))
    np.testing.assert_allclose(found, clip(matrix, 1.2), atol=1e-13)
    ahead, behind = (clip(matrix + h * direction, 1.2 + 0.36 * h) for h in (1e-6, -1e-6))
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-6, atol=1e-7)


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 6, rngs=rngs)
        self.conv = nnx.Conv(4, 6, (3, 3), feature_group_count=2, rngs=rngs)
        self.heads = nnx.LinearGeneral(4, (2, 3), rngs=rngs)
        self.stacked = nnx.vmap(lambda r: nnx.Linear(3, 3, rngs=r))(rngs.split(2))


def as_matrices(model):
    grouped = np.asarray(model.conv.kernel[...]).reshape(18, 2, 3)
    return [
        np.asarray(model.dense.kernel[...]),
        *(grouped[:, group] for group in range(2)),
        np.asarray(model.heads.kernel[...]).reshape(4, 6),
        *np.asarray(model.stacked.kernel[...]),
    ]


def norms(model):
    return [np.linalg.norm(matrix, 2) for matrix in as_matrices(model)]


@pytest.mark.parametrize("placement", [None, "gradient"])
def test_kernels_of_all_layers_stay_within_the_bound_under_muon(placement):
    model = Layers(nnx.Rngs(0))
    bound = cx.SpectralNorm(0.5, placement=placement)
    np.testing.assert_allclose(
        bound.violation(model, None, None), max(norms(model)) - 0.5, rtol=1e-5
    )
    rate = optax.cosine_decay_schedule(0.1, 150)
    tx = optax.contrib.muon(rate)
    optimizer = nnx.Optimizer(model, cx.constrain(tx, bound, model=model), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        # The loss pulls every kernel far beyond the bound.
        state = nnx.state(model, nnx.Param)
        optimizer.update(
            model,
            jax.tree.map(lambda p: p - 3.0 * jnp.cos(jnp.arange(p.size)).reshape(p.shape), state),
        )

    reached = []
    for _ in range(150):
        step(model, optimizer)
        reached.append(max(norms(model)))
    if placement is None:
        assert max(reached) < 0.5 + 1e-5
        # At the optimum, the nearest point to the target: all singular values are at the bound.
        target = 3.0 * np.cos(np.arange(24)).reshape(4, 6)
        np.testing.assert_allclose(model.dense.kernel[...], clip(target, 0.5), atol=2e-3)
    else:
        assert max(reached[-20:]) < 2  # a gradient within the bound, and Muon leaves it


def test_rows_are_used_where_another_constraint_moves_the_kernel(x64):
    weights = jax.random.normal(jax.random.key(0), (5, 3), jnp.float64)
    model = nnx.Linear(5, 3, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    model.kernel.set_value(weights / np.linalg.norm(weights, 2))
    every = (
        cx.SpectralNorm(0.8, values=3, gamma=1.0),
        cx.Affine(lambda m: m.kernel[...], np.ones((1, 5)), axis=0, gamma=1.0),
    )
    parameters = nnx.as_pure(nnx.state(model, nnx.Param))
    optimizer = cx.constrain(optax.sgd(0.0), every, model=model)
    state = optimizer.init(parameters)
    step = jax.jit(lambda p, s: optimizer.update(p, s, p))
    for _ in range(30):
        update, state = step(parameters, state)
        parameters = optax.apply_updates(parameters, update)
    assert np.linalg.norm(parameters["kernel"], 2) < 0.8 + 1e-6
    np.testing.assert_allclose(np.sum(parameters["kernel"], axis=0), 0, atol=1e-9)


def test_what_has_no_kernel_is_refused():
    with pytest.raises(ValueError, match="finds no kernel"):
        cx.SpectralNorm(1.0).residual(nnx.Dropout(0.5), None, key=None)
    with pytest.raises(ValueError, match="must select matrices"):
        cx.SpectralNorm(1.0, of=lambda m: m).residual(jnp.ones((2, 2, 2)), None, key=None)
    with pytest.raises(ValueError, match="must be above 0"):
        cx.SpectralNorm(0.0)
