"""Closed forms and simulations of Xu et al.: Lemma 1's example and Theorem 1."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def constraint(s: Floats, sigma: Floats) -> float:
    """``sum_i s_i^2 / sigma_i^2``, which Lemma 1 requires to be at most ``1 / sigma_*^2``."""
    return float(np.sum((s / sigma) ** 2))


def proportional_noise(s: Floats, noise_multiplier: float = 1.0) -> Floats:
    """The paper's ``sigma_i = sigma_* sqrt(m) s_i``."""
    return noise_multiplier * math.sqrt(len(s)) * s


def optimal_noise(s: Floats, noise_multiplier: float = 1.0) -> Floats:
    """Noise of the least total variance under Lemma 1: ``sigma_i^2 = sigma_*^2 s_i sum(s)``."""
    return np.asarray(noise_multiplier * np.sqrt(s * s.sum()))


def cosines(signal: Floats, sigma: Floats, draws: int, seed: int) -> tuple[float, float, float]:
    """Mean, median and s.d. over ``draws`` of ``cos(f + Z, f)``, ``Z_i ~ N(0, sigma_i^2)``."""
    generator = np.random.Generator(np.random.Philox(key=seed))
    noisy = generator.standard_normal((draws, len(signal))) * sigma + signal
    values = noisy @ signal / (np.linalg.norm(noisy, axis=1) * np.linalg.norm(signal))
    return float(values.mean()), float(np.median(values)), float(values.std())


def theorem_1(
    *, noise_multiplier: float, rate: float, steps: int, delta: float, alpha: int
) -> float:
    """Epsilon of Theorem 1 as printed, at one order.

    It is the bound of Wang, Balle and Kasiviswanathan (2019) for sampling *without*
    replacement and replace-one adjacency, although the algorithm uses Poisson sampling.

    Parameters
    ----------
    noise_multiplier : float
        The paper's sigma_*.
    rate : float
        Sampling rate L / N.
    alpha : int
        Renyi order, at least 2.
    """

    def alternating(order: int) -> float:
        terms = (
            (-1.0) ** i * math.comb(order, i) * math.exp(i * (i - 1) / (2 * noise_multiplier**2))
            for i in range(order + 1)
        )
        return float(sum(terms))

    e = math.exp(1 / noise_multiplier**2)
    total = 1 + rate**2 * math.comb(alpha, 2) * min(4 * (e - 1), 2 * e)
    for j in range(3, alpha + 1):
        product = alternating(2 * math.ceil(j / 2)) * alternating(2 * (j // 2))
        total += 4 * rate**j * math.comb(alpha, j) * math.sqrt(product)
    return steps * math.log(total) / (alpha - 1) + math.log(1 / delta) / (alpha - 1)


def paper_rdp(
    *, noise_multiplier: float, rate: float, steps: int, delta: float, alpha: int
) -> float:
    """Epsilon at one integer order of the Poisson-sampled Gaussian, with the conversion of 2017.

    It is ``R + log(1 / delta) / (alpha - 1)``, from which the paper's (4.0, 1e-5) follows.
    """
    moment = sum(
        math.comb(alpha, k)
        * (1 - rate) ** (alpha - k)
        * rate**k
        * math.exp((k * k - k) / (2 * noise_multiplier**2))
        for k in range(alpha + 1)
    )
    return (steps * math.log(moment) + math.log(1 / delta)) / (alpha - 1)
