"""The Gaussian process, against dense formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy import stats

import constrainx as cx
from constrainx.models import FourierProcess
from constrainx.recipes import gp_calibration


def problem():
    process = FourierProcess(features=12, solver=cx.LSMR(rtol=1e-12), rngs=nnx.Rngs(0))
    nnx.update(process, jax.tree.map(lambda leaf: leaf.astype(jnp.float64), nnx.state(process)))
    x = jnp.linspace(0.0, 1.0, 40)
    return process, x, jnp.cos(6 * x)


def test_weights_are_ridge_regression(x64):
    process, x, y = problem()
    phi, noise = np.asarray(process.features(x)), float(process.noise)
    expected = np.linalg.solve(phi.T @ phi + noise**2 * np.eye(12), phi.T @ y)
    np.testing.assert_allclose(process.weights(x, y), expected, rtol=1e-7)


def test_the_marginal_likelihood_is_that_of_a_gaussian(x64):
    process, x, y = problem()
    phi = np.asarray(process.features(x))
    covariance = phi @ phi.T + float(process.noise) ** 2 * np.eye(40)
    expected = stats.multivariate_normal(np.zeros(40), covariance).logpdf(y)
    np.testing.assert_allclose(process.log_marginal(x, y), expected, rtol=1e-8)


def test_losses_have_the_right_gradients(x64):
    process, x, y = problem()
    graph, params, rest = nnx.split(process, nnx.Param, ...)
    for loss in (gp_calibration.predictive, gp_calibration.as_in_the_paper):

        def value(params, loss=loss):
            return loss(nnx.merge(graph, params, rest), {"x": x, "y": y})

        gradient = jax.grad(value)(params)
        for name in ("log_length", "log_scale", "log_noise"):
            step = 1e-5
            up, down = (move(params, name, sign * step) for sign in (1, -1))
            expected = (value(up) - value(down)) / (2 * step)
            np.testing.assert_allclose(gradient[name][...], expected, rtol=1e-5, atol=1e-9)


def move(params, name, amount):
    copy = jax.tree.map(lambda leaf: leaf, params)
    copy[name] = copy[name].replace(copy[name][...] + amount)
    return copy
