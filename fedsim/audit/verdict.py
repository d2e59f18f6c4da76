"""The audit: attack a strategy's claim from several sides, and say whether it stands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fedsim.audit.canaries import WORLDS, World
from fedsim.audit.claim import Claim
from fedsim.audit.one_run import OneRun, guess
from fedsim.audit.runs import PARAMETERS, Parameters, Plan, StrategyFactory
from fedsim.audit.two_world import TwoWorlds, attack
from fedsim.errors import FedsimError

__all__ = ["Verdict", "audit"]


@dataclass(frozen=True)
class Verdict:
    """What an audit found.

    Attributes
    ----------
    claim : Claim
        Of the runs of the two-world attacks.
    two_worlds : tuple of TwoWorlds
    one_run : OneRun or None
    one_run_claim : Claim or None
        The one run may have more rounds, and then claims something of its own.
    confidence : float
        Probability with which a true claim is accepted, at least.
    rounds, runs : int
        Of the two-world attacks; ``runs`` in each of a world's two halves.
    """

    claim: Claim
    two_worlds: tuple[TwoWorlds, ...]
    one_run: OneRun | None
    one_run_claim: Claim | None
    confidence: float
    rounds: int
    runs: int

    @property
    def risk(self) -> float:
        """Of each attack: they share the verdict's between them (Bonferroni)."""
        return (1 - self.confidence) / (len(self.two_worlds) + (self.one_run is not None))

    @property
    def refuting(self) -> tuple[str, ...]:
        """Attacks that no system for which the claim is true would have let succeed."""
        names = [found.world for found in self.two_worlds if found.p_value <= self.risk]
        if self.one_run is not None and self.one_run.p_value <= self.risk:
            names.append("one run")
        return tuple(names)

    @property
    def accepted(self) -> bool:
        """Whether no attack refuted the claim."""
        return not self.refuting

    @property
    def epsilon_bound(self) -> float:
        """Largest lower bound on epsilon that an attack on `claim` proved."""
        return max((found.epsilon_bound for found in self.two_worlds), default=0.0)

    def __str__(self) -> str:
        attacks = len(self.two_worlds) + (self.one_run is not None)
        if self.accepted:
            return (
                f"The claim stands: none of {attacks} attacks does better than (epsilon, delta) = "
                f"({self.claim.epsilon:.3g}, {self.claim.delta:g}) allows, at "
                f"{self.confidence:.4g} confidence."
            )
        return (
            f"The claim is refuted by {' and '.join(self.refuting)}: more leaks than (epsilon, "
            f"delta) = ({self.claim.epsilon:.3g}, {self.claim.delta:g}) allows, at "
            f"{self.confidence:.4g} confidence."
        )


def audit(
    strategy: StrategyFactory,
    *,
    rounds: int = 1,
    runs: int = 1000,
    worlds: Sequence[World] = WORLDS,
    canaries: int = 512,
    one_run: Plan | None = None,
    confidence: float = 0.99,
    start: Parameters = PARAMETERS,
    seed: int = 1,
    tick: Callable[[int], None] = lambda runs: None,
) -> Verdict:
    """Attack the claim that a strategy's own ledger makes.

    In each world the strategy is run ``runs`` times without and ``runs`` times with a canary
    client, on a `LocalGrid`; score and threshold are chosen on one half and errors counted on
    the other. In the one run, every canary is in or out by a coin, and the coins are guessed.

    Parameters
    ----------
    strategy : callable
        From a seed to a fresh `DPFedAvg`.
    rounds : int
        Of each run; mechanisms that adapt show it from the second.
    worlds : sequence of World
    canaries : int
        Of the one run, at most; 0 leaves it out.
    one_run : Plan, optional
        What the one run does, if not the same: it can afford more rounds.
    confidence : float
        Probability with which a true claim is accepted, at least.
    start : mapping of name to Tensor
        Initial parameters of the two-world runs.
    seed : int
        Of all runs; another one makes another audit.
    tick : callable
        Told the number of runs made, now and then.

    Raises
    ------
    FedsimError
        If the ledger claims nothing (its epsilon is infinite), or an argument is impossible.
    """
    if not 0 < confidence < 1:
        raise FedsimError(f"confidence is {confidence}; it must lie strictly between 0 and 1.")
    if runs < 20 and worlds:
        raise FedsimError(f"runs is {runs}; it must be at least 20.")
    attacks = len(worlds) + (canaries > 0)
    if not attacks:
        raise FedsimError("there is neither a world nor a canary; an audit needs one of them.")
    risk = (1 - confidence) / attacks
    plan = Plan(strategy, rounds)
    claim: Claim | None = None
    found = []
    for number, world in enumerate(worlds):
        result, claim = attack(plan, world, start, runs, risk, seed + number, tick)
        found.append(result)
    guessed = guessed_claim = None
    if canaries:
        whole = one_run or plan
        population = whole.strategy(seed).cohort.population or 0
        canaries = min(canaries, population)
        d = 2 ** math.ceil(math.log2(max(canaries, 8)))
        guessed, guessed_claim = guess(whole, _spread(start, d), canaries, risk, seed)
    claim = claim or guessed_claim
    assert claim is not None
    return Verdict(claim, tuple(found), guessed, guessed_claim, confidence, rounds, runs)


def _spread(start: Parameters, d: int) -> Parameters:
    """``d`` parameters under the same names."""
    names = list(start)
    sizes = [d // len(names)] * len(names)
    sizes[0] += d - sum(sizes)
    return {
        name: torch.zeros(size, dtype=torch.float64)
        for name, size in zip(names, sizes, strict=True)
    }
