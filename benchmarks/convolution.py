"""A square convolution matrix with a kernel of five taps, and derivatives known in float64."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float

TAPS = 5
DOMINANCE = 0.99


class Problem(NamedTuple):
    """A x = b with A the convolution by ``kernel``, and the target of the loss."""

    kernel: Float[Array, " taps"]
    b: Float[Array, " n"]
    target: Float[Array, " n"]


def problem(size: int) -> Problem:
    """A random problem, the kernel being the same for every size.

    All entries are standard normal but the middle tap, which is set so that the others sum to
    `DOMINANCE` of it in absolute value. Without that the condition number grows with n, and with it
    the iterations; with it, it is about 30.
    """
    kernel = jax.random.normal(jax.random.key(0), (TAPS,))
    middle = TAPS // 2
    others = jnp.sum(jnp.abs(kernel.at[middle].set(0)))
    kernel = kernel.at[middle].set(jnp.copysign(others / DOMINANCE, kernel[middle]))
    b, target = jax.random.normal(jax.random.key(1), (2, size))
    return Problem(kernel, b, target)


def matvec(v: Float[Array, " n"], kernel: Float[Array, " taps"]) -> Float[Array, " n"]:
    """A v as a sum of shifts, which XLA runs about twice as fast on CPUs as `jnp.convolve`."""
    padded = jnp.pad(v, TAPS // 2)
    return sum(kernel[i] * padded[i : i + v.size] for i in range(TAPS))


def rmatvec(u: Float[Array, " n"], kernel: Float[Array, " taps"]) -> Float[Array, " n"]:
    """Aᵀ u, which is what matfree asks for."""
    return jax.linear_transpose(lambda v: matvec(v, kernel), u)(u)[0]


def loss(x: Float[Array, " n"], target: Float[Array, " n"]) -> Float[Array, ""]:
    """½‖x − target‖²."""
    return 0.5 * jnp.sum(jnp.square(x - target))


def exact_gradients(at: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of the loss by kernel and by b, by banded elimination in float64.

    With p = A⁻ᵀ(x − target) they are −⟨p, shiftᵢ x⟩ for tap i, and p.
    """
    kernel, b, target = (np.asarray(part, np.float64) for part in at)
    bands, size, half = (TAPS // 2, TAPS // 2), b.size, TAPS // 2
    x = scipy.linalg.solve_banded(bands, np.repeat(kernel[::-1, None], size, axis=1), b)
    p = scipy.linalg.solve_banded(bands, np.repeat(kernel[:, None], size, axis=1), x - target)
    padded = np.pad(x, half)
    return np.array([-p @ padded[i : i + size] for i in range(TAPS)]), p
