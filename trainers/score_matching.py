"""Denoising score matching, and metrics of a score function.

Noise of standard deviation σ turns the data's density p into p_σ = p ∗ N(0, σ²I), with the score
∇ log p_σ. Noise levels are uniform in log σ. A score function is (x, σ) ↦ s, with batches of both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from constrainx.errors import MissingPackageError

Score: TypeAlias = Callable[[Float[Array, "batch d"], Float[Array, " batch"]], Array]


@dataclasses.dataclass(frozen=True)
class Noise:
    """Levels of noise, σ(t) = smallest (largest / smallest)ᵗ for t in [0, 1]."""

    smallest: float = 0.1
    largest: float = 3.0

    def at(self, t: Array) -> Array:
        """σ(t)."""
        return self.smallest * (self.largest / self.smallest) ** t

    def add_to(self, batch: dict[str, Array], key: Array) -> dict[str, Array]:
        """The batch with a noise level, noise and a noisy point for each example."""
        level_key, noise_key = jax.random.split(key)
        x = batch["x"]
        sigma = self.at(jax.random.uniform(level_key, x.shape[:1]))
        noise = jax.random.normal(noise_key, x.shape)
        return {**batch, "sigma": sigma, "noise": noise, "noisy": x + sigma[:, None] * noise}

    def levels(self, count: int) -> Array:
        """This many levels, from the smallest to the largest."""
        return self.at(jnp.linspace(0.0, 1.0, count))


def denoising_loss(score: Score, batch: dict[str, Array]) -> Float[Array, " batch"]:
    """‖σ s(x + σ z, σ) + z‖²."""
    scaled = batch["sigma"][:, None] * score(batch["noisy"], batch["sigma"])
    return jnp.sum((scaled + batch["noise"]) ** 2, axis=1)


def jacobians(
    score: Score, x: Float[Array, "batch d"], sigma: Float[Array, " batch"]
) -> Float[Array, "batch d d"]:
    """∂s/∂x at each point, column by column in forward mode."""

    def column(direction: Array) -> Array:
        tangent = jnp.broadcast_to(direction, x.shape)
        return jax.jvp(lambda x: score(x, sigma), (x,), (tangent,))[1]

    return jnp.moveaxis(jax.vmap(column)(jnp.eye(x.shape[1], dtype=x.dtype)), 0, 2)


def asymmetry(jacobian: Float[Array, "batch d d"]) -> Float[Array, " batch"]:
    """½‖J − Jᵀ‖², which is tr(J Jᵀ) − tr(J J)."""
    return 0.5 * _squares(jacobian - jnp.swapaxes(jacobian, 1, 2))


def normalised_asymmetry(jacobian: Float[Array, "batch d d"]) -> Float[Array, " batch"]:
    """‖J − Jᵀ‖² / (4‖J‖²), between zero and one."""
    return _squares(jacobian - jnp.swapaxes(jacobian, 1, 2)) / (4 * _squares(jacobian))


def kernel_density(
    points: Float[Array, "points d"], x: Float[Array, "batch d"], sigma: Float[ArrayLike, ""]
) -> tuple[Float[Array, " batch"], Float[Array, "batch d"]]:
    """The logarithm of p_σ and its gradient, exact for the empirical distribution of the points.

    Args:
        points: the data without noise.
        x: where to evaluate.
        sigma: the noise level.
    """
    d, variance = points.shape[1], jnp.square(sigma)

    def at(x: Float[Array, " d"]) -> tuple[Array, Array]:
        exponents = -0.5 * jnp.sum((points - x) ** 2, axis=1) / variance
        weights = jax.nn.softmax(exponents)
        log = jax.nn.logsumexp(exponents) - math.log(len(points))
        log -= 0.5 * d * jnp.log(2 * jnp.pi * variance)
        return log, (weights @ points - x) / variance

    return jax.lax.map(at, x, batch_size=64)


def log_density(
    score: Score,
    x: Float[Array, "batch d"],
    *,
    noise: Noise,
    log_prior: Callable[[Float[Array, "batch d"]], Float[Array, " batch"]],
    rtol: float = 1e-4,
) -> Float[Array, " batch"]:
    """The logarithm of p at the smallest level of noise, by the probability-flow equation.

    In τ = log σ the flow is dx/dτ = −σ² s(x, σ), and log p falls along it by the flow's divergence;
    it ends at the largest level, where the density is known. Solved by diffrax.

    Args:
        score: a score function.
        x: points with noise of the smallest level.
        noise: the levels to integrate between.
        log_prior: the log-density at the largest level.
        rtol: the relative tolerance of the solver.
    """
    try:
        import diffrax
    except ImportError as error:
        raise MissingPackageError(
            "`log_density` integrates with diffrax: pip install 'constrainx[science]'."
        ) from error

    def flow(tau: Any, state: tuple[Array, Array], args: None) -> tuple[Array, Array]:
        del args
        x = state[0]
        sigma = jnp.full(x.shape[:1], jnp.exp(tau))
        s = score(x, sigma)
        divergence = jnp.trace(jacobians(score, x, sigma), axis1=1, axis2=2)
        return -(sigma[:, None] ** 2) * s, -(sigma**2) * divergence

    start, end = math.log(noise.smallest), math.log(noise.largest)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(flow),
        diffrax.Tsit5(),
        start,
        end,
        dt0=None,
        y0=(x, jnp.zeros(x.shape[0])),
        stepsize_controller=diffrax.PIDController(rtol=rtol, atol=rtol),
        max_steps=2000,
    )
    final, change = (leaf[-1] for leaf in solution.ys)
    return log_prior(final) + change


def _squares(matrices: Float[Array, "batch d d"]) -> Float[Array, " batch"]:
    return jnp.sum(matrices**2, axis=(1, 2))
