"""Dense least squares in float64 with NumPy alone: the reference for everything matrix-free."""

from __future__ import annotations

import dataclasses

import numpy as np


def solve(A, b, damp=0.0, *, rcond=1e-10):
    """The minimum-norm minimiser of ‖A x − b‖² + damp²‖x‖², by the singular value decomposition."""
    U, s, Vt = np.linalg.svd(np.asarray(A, np.float64), full_matrices=False)
    keep = s > rcond * s.max(initial=0.0)
    filtered = np.where(keep, s / np.where(keep, s**2 + damp**2, 1.0), 0.0)
    return Vt.T @ (filtered * (U.T @ np.asarray(b, np.float64)))


def matrix(rows, columns, *, rank=None, condition=10.0, seed=0):
    """A random matrix with the given rank and condition number, singular values log-spaced."""
    rng = np.random.default_rng(seed)
    rank = min(rows, columns) if rank is None else rank
    U, _ = np.linalg.qr(rng.normal(size=(rows, rank)))
    V, _ = np.linalg.qr(rng.normal(size=(columns, rank)))
    return (U * np.geomspace(1.0, 1.0 / condition, rank)) @ V.T


@dataclasses.dataclass(frozen=True)
class Case:
    """A least-squares problem whose matrix moves along a curve of constant rank."""

    name: str
    rows: int
    columns: int
    rank: int
    consistent: bool = False

    def __str__(self):
        return self.name

    @property
    def full_rank(self):
        return self.rank == min(self.rows, self.columns)

    def problem(self, seed=0):
        """A(t) = (I + t L) A (I + t R) as (A, L, R), and b."""
        rng = np.random.default_rng(seed + 1)
        A = matrix(self.rows, self.columns, rank=self.rank, condition=5.0, seed=seed)
        L = 0.3 * rng.normal(size=(self.rows, self.rows))
        R = 0.3 * rng.normal(size=(self.columns, self.columns))
        b = rng.normal(size=self.rows)
        if self.consistent:
            b = A @ rng.normal(size=self.columns)
        return A, L, R, b


# In few shapes, each of which is compiled once.
CASES = [
    Case("tall", 7, 5, 5),
    Case("tall-consistent", 7, 5, 5, consistent=True),
    Case("wide", 5, 7, 5),
    Case("square", 6, 6, 6),
    Case("tall-deficient", 7, 5, 3),
    Case("tall-deficient-consistent", 7, 5, 3, consistent=True),
    Case("wide-deficient", 5, 7, 3),
    Case("square-deficient", 6, 6, 4),
    Case("row", 1, 6, 1),
    Case("column", 6, 1, 1),
]


def moved(A, L, R, t):
    """A(t); works for NumPy and for JAX arrays."""
    return A + t * (L @ A + A @ R) + t * t * (L @ A @ R)


def derivative(function, t, step=1e-5):
    """A central difference."""
    return (function(t + step) - function(t - step)) / (2 * step)


def second_derivative(function, t, step=1e-3):
    """A central second difference of fourth order."""
    f = function
    h = step
    inner = 16 * (f(t + h) + f(t - h)) - (f(t + 2 * h) + f(t - 2 * h)) - 30 * f(t)
    return inner / (12 * h * h)
