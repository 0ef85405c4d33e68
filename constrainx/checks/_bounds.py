"""What a sample tells about all points: upper confidence bounds on a mean and on a share."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float
from scipy import stats


def bound_mean(values: Float[np.ndarray, " n"], *, confidence: float = 0.95) -> float:
    """An upper confidence bound on the mean of the distribution that the values are drawn from.

    The larger of two: Student's bound, m + t s / √n, and Hall's (1992), which corrects it for the
    skewness of the values. Violations have a long right tail, for which Student's alone is too
    small too often. No bound on a mean holds for every distribution: for tails so heavy that the
    sample has not seen what dominates the mean, this one fails as well, see `is_trustworthy`.

    >>> print(round(bound_mean(np.arange(10.0)), 2))
    6.26

    Args:
        values: independent, and finite.
        confidence: how often the bound is to hold.

    Returns:
        The bound; infinity for fewer than two values.
    """
    n = len(values)
    if n < 2:
        return math.inf
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    # Values that differ only by rounding have a spread, but no skewness to speak of.
    if spread <= 1e-12 * abs(mean):
        return mean
    quantile = float(stats.t.ppf(confidence, n - 1))
    skew = measure_skewness(values) / math.sqrt(n)
    reach = quantile
    if abs(skew) > 1e-6:
        # The inverse of T + γ T²/3√n + γ² T³/27n + γ/6√n at −t.
        reach = max(quantile, -3 / skew * (math.cbrt(1 - skew * (quantile + skew / 6)) - 1))
    return mean + reach * spread / math.sqrt(n)


def is_trustworthy(values: Float[np.ndarray, " n"]) -> bool:
    """Whether the sample is large enough for its skewness: n > 25 γ² (Cochran 1977)."""
    return len(values) > 25 * measure_skewness(values) ** 2


def bound_share(hits: int, count: int, *, confidence: float = 0.95) -> float:
    """Clopper and Pearson's upper bound on a share, from how many of a sample are hits.

    It holds for any distribution and any number of points. Without a hit it is about 3 / count.

    >>> print(round(bound_share(0, 300), 4), bound_share(5, 5))
    0.0099 1.0
    """
    if hits >= count:
        return 1.0
    return float(stats.beta.ppf(confidence, hits + 1, count - hits))


def measure_skewness(values: Float[np.ndarray, " n"]) -> float:
    """The third standardised moment of the values; zero where they are all the same."""
    centred = values - np.mean(values)
    spread = math.sqrt(float(np.mean(centred**2)))
    return 0.0 if spread == 0 else float(np.mean((centred / spread) ** 3))
