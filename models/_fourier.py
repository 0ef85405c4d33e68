"""A Gaussian process by random Fourier features (Rahimi and Recht, 2007)."""

from __future__ import annotations

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from constrainx.linalg import LSMR, Solver, lstsq

# Data may come from the host.
Points: TypeAlias = Float[Array | np.ndarray, " points"]


class Fixed(nnx.Variable):
    """A variable that is drawn once and not trained."""


class FourierProcess(nnx.Module):
    """f(x) = Φ(x) z with z ~ N(0, I), Φ(x) = σ √(2/k) [cos(ωᵢ x / ℓ + bᵢ)], y = f(x) + N(0, λ²).

    The logarithms of ℓ, σ and λ are trained. Without the factor √(2/k), which the paper leaves out,
    σ would depend on the number of features.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> process = FourierProcess(features=20, rngs=nnx.Rngs(0))
    >>> x = jnp.linspace(0, 1, 50)
    >>> process.mean(x, process.weights(x, jnp.sin(6 * x))).shape
    (50,)
    """

    def __init__(
        self,
        *,
        features: int = 200,
        length: float = 0.3,
        scale: float = 1.0,
        noise: float = 0.5,
        solver: Solver = LSMR(rtol=1e-5),
        rngs: nnx.Rngs,
    ):
        self.frequencies = Fixed(jax.random.normal(rngs(), (features,)))
        self.phases = Fixed(jax.random.uniform(rngs(), (features,), maxval=2 * math.pi))
        self.log_length = nnx.Param(jnp.log(length))
        self.log_scale = nnx.Param(jnp.log(scale))
        self.log_noise = nnx.Param(jnp.log(noise))
        self.solver = solver

    @property
    def noise(self) -> Float[Array, ""]:
        """λ."""
        return jnp.exp(self.log_noise[...])

    def features(self, x: Points) -> Float[Array, "points features"]:
        """Φ(x)."""
        frequencies = self.frequencies[...] / jnp.exp(self.log_length[...])
        size = jnp.exp(self.log_scale[...]) * math.sqrt(2 / len(frequencies))
        return size * jnp.cos(x[:, None] * frequencies + self.phases[...])

    def weights(self, x: Points, y: Points) -> Float[Array, " features"]:
        """The posterior mean of z, by least squares with damping λ."""
        like = jnp.zeros(self.frequencies[...].shape)
        return lstsq(
            lambda v, phi: phi @ v,
            y,
            self.features(x),
            like=like,
            damp=self.noise,
            solver=self.solver,
        )[0]

    def mean(self, x: Points, weights: Float[Array, " features"]) -> Float[Array, " points"]:
        """The posterior mean of f."""
        return self.features(x) @ weights

    def log_marginal(self, x: Points, y: Points) -> Float[Array, ""]:
        """Log N(y | 0, Φ Φᵀ + λ² I), by a Cholesky factor of the covariance."""
        phi = self.features(x)
        covariance = phi @ phi.T + self.noise**2 * jnp.eye(len(x))
        factor = jnp.linalg.cholesky(covariance)
        white = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        half_determinant = jnp.sum(jnp.log(jnp.diagonal(factor)))
        return -0.5 * jnp.sum(white**2) - half_determinant - 0.5 * len(x) * math.log(2 * math.pi)
