"""Differential equations with boundary conditions and known solutions, for networks to solve."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.special
import scipy.stats
from jaxtyping import Array, Float

# A function of one point, with two coordinates.
Field: TypeAlias = Callable[[Float[Array, "2"]], Float[Array, ""]]


class Equation(abc.ABC):
    """A boundary value problem in two coordinates: residuals inside and on the edge, both zero.

    >>> import jax.numpy as jnp
    >>> poisson = Poisson()
    >>> def solution(p): return jnp.sin(jnp.pi * p[0]) * jnp.sin(2 * jnp.pi * p[1])
    >>> print(abs(poisson.residual(solution, jnp.array([0.2, 0.3]))) < 1e-4)
    True
    """

    name: ClassVar[str]
    # What the coordinates are called.
    axes: ClassVar[tuple[str, str]] = ("x", "y")
    # The smallest box around the domain.
    box: ClassVar[tuple[tuple[float, float], tuple[float, float]]] = ((0.0, 1.0), (0.0, 1.0))

    @abc.abstractmethod
    def residual(self, u: Field, point: Float[Array, 2]) -> Float[Array, ""]:
        """What is zero inside."""

    @abc.abstractmethod
    def condition(self, u: Field, point: Float[Array, 2]) -> Float[Array, ""]:
        """What is zero on the edge."""

    @abc.abstractmethod
    def exact(self, points: Float[np.ndarray, "points 2"]) -> Float[np.ndarray, " points"]:
        """The solution, in float64."""

    @abc.abstractmethod
    def edge(self, count: int) -> Float[np.ndarray, "points 2"]:
        """Points on the edge, away from its corners."""

    def contains(self, points: Float[np.ndarray, "points 2"]) -> np.ndarray:
        """Which points of the box lie in the domain."""
        return np.ones(len(points), bool)

    def inside(self, count: int, *, seed: int) -> Float[np.ndarray, "points 2"]:
        """Points that fill the domain evenly, by a Halton sequence."""
        sequence = scipy.stats.qmc.Halton(2, seed=seed)
        low, high = np.transpose(self.box)
        found = np.zeros((0, 2))
        while len(found) < count:
            drawn = low + (high - low) * sequence.random(count)
            found = np.concatenate([found, drawn[self.contains(drawn)]])
        return found[:count]

    def enforce(self, point: Float[Array, 2], value: Array) -> Array:
        """A field that obeys the conditions for any value; not every equation has one."""
        raise NotImplementedError(f"no such field is known for {self.name}")

    @property
    def can_enforce(self) -> bool:
        """Whether `enforce` works."""
        return type(self).enforce is not Equation.enforce


@dataclasses.dataclass(frozen=True)
class Poisson(Equation):
    """−Δu = f on the unit square, u = 0 on its edge, with u = sin(πx) sin(2πy)."""

    name: ClassVar[str] = "poisson"

    def residual(self, u: Field, point: Float[Array, 2]) -> Float[Array, ""]:
        """−Δu − f, in units of 5π²."""
        x, y = point
        f = jnp.sin(jnp.pi * x) * jnp.sin(2 * jnp.pi * y)
        return -(second(u, point, 0) + second(u, point, 1)) / (5 * math.pi**2) - f

    def condition(self, u: Field, point: Float[Array, 2]) -> Float[Array, ""]:
        """The value of u."""
        return u(point)

    def exact(self, points: Float[np.ndarray, "points 2"]) -> Float[np.ndarray, " points"]:
        """The product of two sines."""
        x, y = points.T
        return np.sin(np.pi * x) * np.sin(2 * np.pi * y)

    def edge(self, count: int) -> Float[np.ndarray, "points 2"]:
        """Equal steps around the square."""
        along = 4 * (np.arange(count) + 0.5) / count
        corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1], [0, 0]], float)
        side, t = along.astype(int), along % 1
        return corners[side] * (1 - t)[:, None] + corners[side + 1] * t[:, None]

    def enforce(self, point: Float[Array, 2], value: Array) -> Array:
        """X (1 − x) y (1 − y) times the value."""
        x, y = point
        return 16 * x * (1 - x) * y * (1 - y) * value


@dataclasses.dataclass(frozen=True)
class HeatRobin(Equation):
    """u_t = u_xx on a rod that loses heat at its ends, u_x = h u at 0 and u_x = −h u at 1.

    The solution is one mode, e^(−k²t) (cos kx + (h/k) sin kx), with tan k = 2kh / (k² − h²).
    """

    name: ClassVar[str] = "heat-robin"
    axes: ClassVar[tuple[str, str]] = ("t", "x")
    loss: float = 1.0

    @functools.cached_property
    def wavenumber(self) -> float:
        """The second k for which the mode obeys the condition at 1."""
        h = self.loss

        def obeys(k: float) -> float:
            return (k**2 - h**2) * math.sin(k) - 2 * k * h * math.cos(k)

        return float(scipy.optimize.brentq(obeys, math.pi + 1e-6, 2 * math.pi, xtol=1e-14))

    def residual(self, u: Field, point: Float[Array, 2]) -> Float[Array, ""]:
        """u_t − u_xx, in units of k²."""
        return (first(u, point, 0) - second(u, point, 1)) / self.wavenumber**2

    def condition(self, u: Field, point: Float[Array, 2]) -> Float[Array, ""]:
        """The Robin conditions at the ends, and the mode at the start."""
        t, x = point
        k, h = self.wavenumber, self.loss
        start = jnp.cos(k * x) + h / k * jnp.sin(k * x)
        slope = (first(u, point, 1) - jnp.where(x == 0, h, -h) * u(point)) / k
        return jnp.where(t == 0, u(point) - start, slope)

    def exact(self, points: Float[np.ndarray, "points 2"]) -> Float[np.ndarray, " points"]:
        """The mode."""
        t, x = points.T
        k = self.wavenumber
        return np.exp(-(k**2) * t) * (np.cos(k * x) + self.loss / k * np.sin(k * x))

    @property
    def box(self) -> tuple[tuple[float, float], tuple[float, float]]:  # type: ignore[override]
        """Until the mode has lost all but a tenth."""
        return ((0.0, math.log(10) / self.wavenumber**2), (0.0, 1.0))

    def edge(self, count: int) -> Float[np.ndarray, "points 2"]:
        """A half at the start, and a quarter at each end of the rod."""
        return _edge_of_rod(count, self.box[0][1], (0.0, 1.0))


@dataclasses.dataclass(frozen=True)
class Burgers(Equation):
    """u_t + u u_x = ν u_xx with ν = 0.01/π, u = −sin(πx) at the start and 0 at x = ±1.

    A shock forms at x = 0. The solution is by Cole and Hopf, an integral over a Gaussian that a
    quadrature of Hermite's computes (Basdevant et al., 1986).
    """

    name: ClassVar[str] = "burgers"
    axes: ClassVar[tuple[str, str]] = ("t", "x")
    box: ClassVar[tuple[tuple[float, float], tuple[float, float]]] = ((0.0, 1.0), (-1.0, 1.0))
    viscosity: float = 0.01 / math.pi

    def residual(self, u: Field, point: Float[Array, 2]) -> Float[Array, ""]:
        """u_t + u u_x − ν u_xx."""
        bend = self.viscosity * second(u, point, 1)
        return first(u, point, 0) + u(point) * first(u, point, 1) - bend

    def condition(self, u: Field, point: Float[Array, 2]) -> Float[Array, ""]:
        """The start, and zero at the ends."""
        t, x = point
        return u(point) + jnp.where(t == 0, jnp.sin(jnp.pi * x), 0)

    def exact(self, points: Float[np.ndarray, "points 2"]) -> Float[np.ndarray, " points"]:
        """The quadrature, with weights taken together as exponents so that none is lost."""
        nodes, weights = scipy.special.roots_hermite(150)
        t, x = points.T
        nu = self.viscosity
        y = x[:, None] - 2 * np.sqrt(nu * t)[:, None] * nodes
        exponent = np.log(weights) - np.cos(np.pi * y) / (2 * np.pi * nu)
        exponent -= exponent.max(axis=1, keepdims=True)
        kernel = np.exp(exponent)
        return -np.sum(np.sin(np.pi * y) * kernel, axis=1) / np.sum(kernel, axis=1)

    def edge(self, count: int) -> Float[np.ndarray, "points 2"]:
        """A half at the start, and a quarter at each end."""
        return _edge_of_rod(count, 1.0, (-1.0, 1.0))

    def enforce(self, point: Float[Array, 2], value: Array) -> Array:
        """−sin(πx) + t (1 − x²) times the value."""
        t, x = point
        return -jnp.sin(jnp.pi * x) + t * (1 - x**2) * value


@dataclasses.dataclass(frozen=True)
class ReactionDiffusion(Equation):
    """−Δu + u³ = f on a flower of five petals, with u = sin(2x + 1) cos(3y) on its edge."""

    name: ClassVar[str] = "reaction-diffusion"
    box: ClassVar[tuple[tuple[float, float], tuple[float, float]]] = ((-1.0, 1.0), (-1.0, 1.0))

    def residual(self, u: Field, point: Float[Array, 2]) -> Float[Array, ""]:
        """−Δu + u³ − f, in units of 13."""
        x, y = point
        wanted = jnp.sin(2 * x + 1) * jnp.cos(3 * y)
        f = 13 * wanted + wanted**3
        return (u(point) ** 3 - second(u, point, 0) - second(u, point, 1) - f) / 13

    def condition(self, u: Field, point: Float[Array, 2]) -> Float[Array, ""]:
        """The value of u beside the one wanted."""
        x, y = point
        return u(point) - jnp.sin(2 * x + 1) * jnp.cos(3 * y)

    def exact(self, points: Float[np.ndarray, "points 2"]) -> Float[np.ndarray, " points"]:
        """The function that f was made for."""
        x, y = points.T
        return np.sin(2 * x + 1) * np.cos(3 * y)

    def contains(self, points: Float[np.ndarray, "points 2"]) -> np.ndarray:
        """Inside of the petals."""
        x, y = points.T
        return np.hypot(x, y) < _petal(np.arctan2(y, x))

    def edge(self, count: int) -> Float[np.ndarray, "points 2"]:
        """Equal angles around the flower."""
        angle = 2 * np.pi * np.arange(count) / count
        return (_petal(angle) * np.stack([np.cos(angle), np.sin(angle)])).T


EQUATIONS: dict[str, Equation] = {
    equation.name: equation for equation in (Poisson(), HeatRobin(), Burgers(), ReactionDiffusion())
}


def first(u: Field, point: Float[Array, 2], axis: int) -> Float[Array, ""]:
    """∂u/∂x along an axis."""
    return jax.jvp(u, (point,), (_unit(point, axis),))[1]


def second(u: Field, point: Float[Array, 2], axis: int) -> Float[Array, ""]:
    """∂²u/∂x² along an axis."""
    return jax.jvp(lambda p: first(u, p, axis), (point,), (_unit(point, axis),))[1]


def as_field(model: Any, equation: Equation, *, enforced: bool = False) -> Field:
    """A model of batches of points, as a function of one point."""

    def u(point: Float[Array, 2]) -> Float[Array, ""]:
        value = model(point[None])[0, 0]
        return equation.enforce(point, value) if enforced else value

    return u


def _unit(point: Float[Array, 2], axis: int) -> Float[Array, 2]:
    return jnp.zeros_like(point).at[axis].set(1)


def _petal(angle: np.ndarray) -> np.ndarray:
    return 0.75 + 0.2 * np.cos(5 * angle)


def _edge_of_rod(
    count: int, end: float, sides: tuple[float, float]
) -> Float[np.ndarray, "points 2"]:
    """Times and places: the start over the whole rod, then both sides over all times."""
    most = (count + 1) // 2
    low, high = sides
    start = low + (high - low) * (np.arange(most) + 0.5) / most
    later = end * (np.arange(count - most) + 0.5) / max(count - most, 1)
    side = np.where(np.arange(count - most) % 2 == 0, low, high)
    times = np.concatenate([np.zeros(most), later])
    return np.stack([times, np.concatenate([start, side])], axis=1)
