"""Attack in one run with many canaries, each included by a coin flip.

The attack is Steinke, Nasr and Jagielski's (2023). Of m canaries, k are guessed and c guesses are
correct. Under f-DP the probabilities of c, c + 1, ... correct guesses bound one another; a
recursion decides whether c can occur with a given probability (Mahloujifar, Melis and Chaudhuri
2024). It is tighter than a bound for one (epsilon, delta), as it uses the whole trade-off curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from scipy.linalg import hadamard
from scipy.stats import binom
from torch import Tensor
from whitebox.clients import EXAMPLES, Bools, Canaries, clipped_scale
from whitebox.ledger_checks import common_claim
from whitebox.target import Target

from fedsim.array_types import Floats
from fedsim.audit.attacks import absence
from fedsim.audit.claim import MIN_P, Claim
from fedsim.audit.findings import Statistic, statistical
from fedsim.audit.two_world import Attack
from fedsim.errors import FedsimError
from fedsim.privacy.losses import bisect_interval
from fedsim.randomness import Purpose, Randomness

SHARES = (0.1, 0.2, 0.4, 0.7, 1.0)
HALVINGS = 20
EPSILON_TOLERANCE = 1e-7


def guess_coins(target: Target, canaries: int, risk: float, seed: int) -> Attack:
    """Choose the number of guesses with a first run, and count correct ones in a second.

    Parameters
    ----------
    target : Target
        The number of its parameters must be a power of two, at least ``canaries``.
    canaries : int
        At most the population.
    """
    (scores, coins, claim), (fresh, fresh_coins, fresh_claim) = (
        _coin_run(target, canaries, seed, run) for run in (0, 1)
    )
    common_claim((claim, fresh_claim))
    # The share of coins that refutes the claim most clearly in the first run.
    share = min(
        SHARES, key=lambda share: refuted_p_value(canaries, *_guess(scores, coins, share), claim)
    )
    widest = max(
        SHARES,
        key=lambda share: guesses_epsilon_bound(
            canaries, *_guess(scores, coins, share), risk, claim.delta
        ),
    )
    guesses, correct = _guess(fresh, fresh_coins, share)
    finding = statistical(
        f"{canaries} canaries, each in or out by a coin",
        wrong_guesses(canaries, guesses, guesses - correct, claim),
    )
    bound = guesses_epsilon_bound(canaries, *_guess(fresh, fresh_coins, widest), risk, claim.delta)
    return Attack(replace(finding, name="one run"), claim, bound)


def _guess(scores: Floats, coins: Bools, share: float) -> tuple[int, int]:
    """Guess "in" for the highest scores, "out" for the lowest: guesses made, and correct ones."""
    half = max(1, round(share * len(scores) / 2))
    order = np.argsort(scores, kind="stable")
    return 2 * half, int((~coins[order[:half]]).sum() + coins[order[-half:]].sum())


def _coin_run(target: Target, canaries: int, seed: int, run: int) -> tuple[Floats, Bools, Claim]:
    """Make a run; return the canaries' scores and coins, both ``[canaries]``, and the claim."""
    draws = Randomness(seed).generator(Purpose.AUDIT, level="run", client=1, part=run)
    run_seed = int(draws.integers(2**63))
    layout, population = target.layout, target.population
    if canaries > min(population, layout.d):
        raise FedsimError(
            f"canaries is {canaries}; it must be at most the population, {population}, and the "
            f"number of parameters, {layout.d}."
        )
    coins = draws.random(canaries) < 0.5
    # The order of ids is arbitrary. Included canaries come first, so that under add-remove the
    # excluded ones can be left out at the end.
    coins = np.sort(coins)[::-1].copy()
    directions = _directions(canaries, layout.d, draws)
    rows = clipped_scale(target.mechanism, layout) * directions
    replaced, ok, exist = absence(~coins, target.adjacency)
    rows[torch.from_numpy(replaced)] *= -1
    metrics = {"num-examples": np.full(canaries, EXAMPLES)}
    metrics |= dict.fromkeys(target.sides, np.zeros(canaries))
    rows = rows[torch.from_numpy(exist)]
    trainer = Canaries(rows, ok[exist], metrics, silent=population - canaries)
    observed = target.observe(trainer, run_seed)
    moved = torch.from_numpy(observed.moves.sum(0))
    return (directions @ moved).numpy(), coins, Claim.from_entries(observed.entries, observed.delta)


def _directions(canaries: int, d: int, draws: np.random.Generator) -> Tensor:
    """Random orthogonal rows of +-1; once scaled, every coordinate of a row reaches its bound."""
    size = 1 << (d.bit_length() - 1)
    if size != d:
        raise FedsimError(f"the model has {d} parameters; one run needs a power of two of them.")
    signs = draws.choice([-1.0, 1.0], size=d)
    chosen = draws.permutation(d)[:canaries]
    return torch.from_numpy(hadamard(d)[chosen] * signs)


def is_refuted(
    canaries: int, guesses: int, correct: int, risk: float, shrink: Callable[[float], float]
) -> bool:
    """Whether this many correct guesses have a probability below ``risk`` under the claim.

    Parameters
    ----------
    shrink : callable
        ``f(1 - r)`` for the claim's curve f: an event of probability r under one neighbour has
        at least this probability under the other.
    """
    if correct <= 0:
        return False
    # Suppose c or more correct guesses had probability `risk`. Then a canary is guessed in these
    # cases, correctly or wrongly, with the two probabilities below. Each smaller number of correct
    # guesses adds to both, at least as much as f-DP demands. If their sum exceeds the share of
    # canaries that are guessed, its largest possible value, the supposition contradicts the claim.
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
    low, high = math.log(MIN_P), 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        refuted = is_refuted(canaries, guesses, correct, math.exp(middle), shrink)
        low, high = (low, middle) if refuted else (middle, high)
    return math.exp(high)


def wrong_guesses(canaries: int, guesses: int, wrong: int, claim: Claim) -> Statistic:
    """Statistic of the number of wrong guesses: how few the claim allows."""

    @cache
    def p_of(count: int) -> float:  # slow, and a limit asks for the same few counts again
        return refuted_p_value(canaries, guesses, guesses - count, claim)

    def p(counts: Floats, _: object) -> Floats:
        return np.array([p_of(int(count)) for count in counts])

    values = np.array([wrong], dtype=np.float64)
    return Statistic(f"{{}} of {guesses} wrong", values, p, float(guesses), whole=True)


def guesses_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Bound on the probability of this many correct guesses in one (epsilon, delta)-DP run.

    Of ``canaries`` clients, each included by a fair coin, ``guesses`` were guessed, ``correct`` of
    them correctly (Steinke, Nasr and Jagielski 2023, theorem 5.2).
    """
    if correct <= 0:
        return 1.0
    guessed = binom(guesses, 1 / (1 + math.exp(-epsilon)))
    tail, masses = float(guessed.sf(correct - 1)), guessed.pmf(np.arange(correct))
    # Maximum of P[v > W >= v - i] / i over i = 1 .. v, where v is the number of correct guesses.
    steepest = float((np.cumsum(masses[::-1]) / np.arange(1, correct + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * steepest)


def guesses_epsilon_bound(
    canaries: int, guesses: int, correct: int, risk: float, delta: float
) -> float:
    """Lower bound on epsilon at ``delta`` from one run's guesses."""
    if guesses_p_value(canaries, guesses, correct, 0.0, delta) > risk:
        return 0.0
    return bisect_interval(
        lambda epsilon: guesses_p_value(canaries, guesses, correct, epsilon, delta) > risk,
        EPSILON_TOLERANCE,
    )[0]
