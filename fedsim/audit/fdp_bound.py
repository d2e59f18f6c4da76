"""Guesses of one run against a trade-off curve (Mahloujifar, Melis and Chaudhuri 2024).

And against one (epsilon, delta) (Steinke, Nasr and Jagielski 2023), for a bound on epsilon.

Of m canaries, each in or out by a coin, k were guessed and c of these rightly. Under f-DP the
probabilities of c, c + 1, ... right guesses bound one another; a recursion over them says
whether so many can happen with a given probability. It is tighter than the bound for one
(epsilon, delta), since the whole curve enters.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import bdtrc, gammaln

from fedsim.audit.claim import Claim

__all__ = [
    "guesses_epsilon_bound",
    "guesses_p_value",
    "is_refuted",
    "most_correct",
    "refuted_p_value",
]

LEAST_P = 1e-12
HALVINGS = 20
EPSILON_HALVINGS = 30

Shrink = Callable[[float], float]


def is_refuted(canaries: int, guesses: int, correct: int, risk: float, shrink: Shrink) -> bool:
    """Whether ``correct`` of ``guesses`` right have probability below ``risk`` under the claim.

    Parameters
    ----------
    shrink : callable
        ``f(1 - r)`` of the claim's curve f: an event of probability r under one neighbour has
        at least that probability under the other.
    """
    if correct <= 0:
        return False
    p_correct = risk * correct / canaries
    p_wrong = risk * (guesses - correct) / canaries
    for index in range(correct - 1, -1, -1):
        grown = max(p_wrong, shrink(min(p_correct, 1.0)))
        p_correct += index / (guesses - index) * (grown - p_wrong)
        p_wrong = grown
        if p_correct + p_wrong > guesses / canaries:
            return True
    return False


def refuted_p_value(canaries: int, guesses: int, correct: int, claim: Claim) -> float:
    """Smallest risk at which these guesses refute the claim."""

    def shrink(probability: float) -> float:
        return float(claim.curve(1 - probability))

    if 2 * correct <= guesses:
        return 1.0
    low, high = math.log(LEAST_P), 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        refuted = is_refuted(canaries, guesses, correct, math.exp(middle), shrink)
        low, high = (low, middle) if refuted else (middle, high)
    return math.exp(high)


def most_correct(canaries: int, guesses: int, risk: float, claim: Claim) -> int:
    """So many correct guesses do not refute the claim at ``risk``."""
    low, high = guesses // 2, guesses
    while low < high:
        middle = (low + high + 1) // 2
        refuted = refuted_p_value(canaries, guesses, middle, claim) <= risk
        low, high = (low, middle - 1) if refuted else (middle, high)
    return low


def guesses_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Probability bound of so many correct guesses in one run, if it is (epsilon, delta)-DP.

    Of ``canaries`` clients, each in or out by a fair coin, ``guesses`` were guessed and
    ``correct`` of these rightly (Steinke, Nasr and Jagielski 2023, theorem 5.2).
    """
    if correct <= 0:
        return 1.0
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(bdtrc(correct - 1, guesses, q))
    fewer = np.arange(correct)
    log_choose = gammaln(guesses + 1) - gammaln(fewer + 1) - gammaln(guesses - fewer + 1)
    log_1q = -epsilon - math.log1p(math.exp(-epsilon))
    masses = np.exp(log_choose + fewer * math.log(q) + (guesses - fewer) * log_1q)
    # P[v > W >= v - i] / i, the largest of them over i = 1 .. v.
    steepest = float((np.cumsum(masses[::-1]) / np.arange(1, correct + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * steepest)


def guesses_epsilon_bound(
    canaries: int, guesses: int, correct: int, risk: float, delta: float
) -> float:
    """Lower bound on epsilon at ``delta`` from one run's guesses."""
    if guesses_p_value(canaries, guesses, correct, 0.0, delta) > risk:
        return 0.0
    low, high = 0.0, 50.0
    for _ in range(EPSILON_HALVINGS):
        middle = (low + high) / 2
        refuted = guesses_p_value(canaries, guesses, correct, middle, delta) <= risk
        low, high = (middle, high) if refuted else (low, middle)
    return low
