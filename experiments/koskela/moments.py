"""The moments accountant of Abadi et al., as Koskela and Honkela's code has it."""

from __future__ import annotations

import math

ORDERS = 32
"""The largest order that the authors' code tries."""


def moments_epsilon(sigma: float, *, rate: float, releases: int, delta: float) -> float:
    """``min over lambda <= 32 of (T alpha(lambda) + ln(1 / delta)) / lambda``.

    ``alpha(lambda) = ln E_{x ~ N(0, sigma^2)} [(1 - q + q e^{(2 x - 1) / (2 sigma^2)})^{lambda +
    1}]`` by its binomial sum, of Poisson batches of rate q and a noise multiplier sigma. The cap
    makes it loose where sigma is large: there the best order is larger.

    Examples
    --------
    >>> [
    ...     round(moments_epsilon(sigma, rate=1 / 300, releases=30_000, delta=1e-5), 3)
    ...     for sigma in (2, 4, 6, 8)
    ... ]
    [1.536, 0.717, 0.515, 0.447]
    """
    return min(
        (releases * _log_moment(order, sigma, rate) + math.log(1 / delta)) / order
        for order in range(1, ORDERS + 1)
    )


def _log_moment(order: int, sigma: float, rate: float) -> float:
    n = order + 1
    return math.log(
        sum(
            math.comb(n, k)
            * (1 - rate) ** (n - k)
            * rate**k
            * math.exp(k * (k - 1) / (2 * sigma**2))
            for k in range(n + 1)
        )
    )
