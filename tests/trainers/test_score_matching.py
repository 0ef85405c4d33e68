"""Metrics of scores, on distributions whose score and density are known."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from constrainx.errors import MissingPackageError
from constrainx.recipes import conservative_score
from constrainx.trainers import score_matching as matching

DEVIATION = 1.5


def gaussian_score(x, sigma):
    """The score of N(0, DEVIATION²) with noise."""
    return -x / (DEVIATION**2 + sigma**2)[:, None]


def test_jacobians_and_asymmetry_of_a_linear_field():
    A = jnp.array([[1.0, 2.0], [-1.0, 3.0]])
    x = jax.random.normal(jax.random.key(0), (5, 2))
    jacobian = matching.jacobians(lambda x, sigma: sigma[:, None] * (x @ A.T), x, jnp.full(5, 2.0))
    np.testing.assert_allclose(jacobian, np.broadcast_to(2 * A, (5, 2, 2)), rtol=1e-6)
    np.testing.assert_allclose(matching.asymmetry(jacobian), 36.0, rtol=1e-6)
    np.testing.assert_allclose(matching.normalised_asymmetry(jacobian), 72 / 240, rtol=1e-6)
    traces = jnp.trace(jacobian @ jacobian.mT - jacobian @ jacobian, axis1=1, axis2=2)
    np.testing.assert_allclose(matching.asymmetry(jacobian), traces, rtol=1e-6)


def test_the_jacobian_of_a_gradient_is_symmetric():
    x = jax.random.normal(jax.random.key(0), (5, 2))
    potential = lambda x: jnp.sin(x[0]) * x[1] ** 2  # noqa: E731
    jacobian = matching.jacobians(lambda x, _: jax.vmap(jax.grad(potential))(x), x, jnp.ones(5))
    assert matching.asymmetry(jacobian).max() < 1e-10


def test_kernel_density_is_a_mixture_of_gaussians():
    rng = np.random.default_rng(0)
    points, x = rng.normal(size=(30, 2)), rng.normal(size=(7, 2))
    density = np.mean([stats.multivariate_normal(p, 0.25).pdf(x) for p in points], axis=0)
    log, score = matching.kernel_density(jnp.asarray(points), jnp.asarray(x), jnp.asarray(0.5))
    np.testing.assert_allclose(log, np.log(density), rtol=1e-4)
    slope = jax.vmap(
        jax.grad(lambda q: matching.kernel_density(jnp.asarray(points), q[None], 0.5)[0][0])
    )(jnp.asarray(x))
    np.testing.assert_allclose(score, slope, rtol=1e-3, atol=1e-4)


def test_the_true_score_minimises_the_denoising_loss():
    noise = matching.Noise()
    x = DEVIATION * jax.random.normal(jax.random.key(0), (20_000, 2))
    batch = noise.add_to({"x": x}, jax.random.key(1))
    assert batch["sigma"].min() >= noise.smallest
    assert batch["sigma"].max() <= noise.largest
    losses = [
        jnp.mean(matching.denoising_loss(lambda x, s, f=f: f * gaussian_score(x, s), batch))
        for f in (0.9, 1.0, 1.1)
    ]
    assert losses[1] < min(losses[0], losses[2])


def test_the_likelihood_of_a_gaussian_is_exact():
    noise = matching.Noise()
    x = jax.random.normal(jax.random.key(0), (50, 2))
    largest = DEVIATION**2 + noise.largest**2

    def log_normal(x, variance):
        return stats.multivariate_normal([0, 0], variance).logpdf(x)

    found = matching.log_density(
        gaussian_score,
        x,
        noise=noise,
        log_prior=lambda x: jax.scipy.stats.norm.logpdf(x, scale=largest**0.5).sum(axis=1),
        rtol=1e-5,
    )
    smallest = DEVIATION**2 + noise.smallest**2
    np.testing.assert_allclose(found, log_normal(x, smallest), rtol=2e-4)


@pytest.mark.parametrize("dataset", ["8gaussian", "spirals", "checkerboard"])
def test_data_sets_match_their_formulas(dataset):
    points = conservative_score.sample(dataset, np.random.default_rng(0), 20_000)
    assert points.shape == (20_000, 2)
    if dataset == "8gaussian":
        # Eight unit directions times 8/√2, with a variance of a half around each.
        radius = np.linalg.norm(points, axis=1)
        assert np.mean(radius**2) == pytest.approx(32 + 1, rel=0.02)
    elif dataset == "spirals":
        assert np.abs(points).max() < (3 * np.pi + 0.5) * 2.3 / 3
        np.testing.assert_allclose(points.mean(axis=0), 0, atol=0.1)
    else:
        squares = np.floor(points / 3).astype(int).sum(axis=1) % 2
        assert (squares == 0).all()


def test_a_likelihood_without_diffrax_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffrax", None)
    with pytest.raises(MissingPackageError, match=r"constrainx\[science\]"):
        matching.log_density(
            gaussian_score, jnp.zeros((1, 2)), noise=matching.Noise(), log_prior=lambda x: x
        )
