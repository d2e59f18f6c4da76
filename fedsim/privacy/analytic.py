"""The Gaussian mechanism without amplification, in closed form.

Any composition of unamplified Gaussians is one Gaussian of ``mu = sqrt(sum 1/z_j^2)``,
whose curve is ``delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)`` (Balle & Wang,
"Improving the Gaussian Mechanism for Differential Privacy", 2018, theorem 8).
"""

from __future__ import annotations

import math

from scipy.special import log_ndtr, ndtr

__all__ = ["gaussian_delta", "gaussian_epsilon", "gaussian_mu"]


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Smallest delta at ``epsilon >= 0`` of a Gaussian of sensitivity ``mu`` stds."""
    if mu == 0:
        return 0.0
    upper = ndtr(mu / 2 - epsilon / mu)
    lower = math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
    return max(0.0, float(upper - lower))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon at ``delta``, to 1e-12 relative, rounded up."""
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(mu, high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(mu, middle) > delta else (low, middle)
    return high


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Largest ``mu`` that is (epsilon, delta)-private, to 1e-12 relative, rounded down."""
    low, high = 0.0, 1.0
    while gaussian_delta(high, epsilon) <= delta:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, epsilon) <= delta else (low, middle)
    return low
