"""Guesses of one run against a trade-off curve (Mahloujifar, Melis and Chaudhuri 2024).

Of m canaries, each in or out by a coin, k were guessed and c of these rightly. Under f-DP the
probabilities of c, c + 1, ... right guesses bound one another; a recursion over them says
whether so many can happen with a given probability. It is tighter than the bound for one
(epsilon, delta), since the whole curve enters.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fedsim.audit.claim import Claim

__all__ = ["is_refuted", "refuted_p_value"]

LEAST_P = 1e-12
HALVINGS = 20

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
