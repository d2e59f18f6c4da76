"""The audit: attack a strategy's claim from several sides, and say whether it is violated."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedsim.arguments import check_arguments
from fedsim.audit import catalogue
from fedsim.audit.checks import Finding, Floats, findings
from fedsim.audit.claim import Claim
from fedsim.audit.clients import WORLDS, World
from fedsim.audit.evidence import ClientEvidence, with_whole_model
from fedsim.audit.one_run import OneRun, guess_coins
from fedsim.audit.target import Parameters, StrategyFactory, StrategyTarget
from fedsim.audit.two_world import TwoWorlds, attack
from fedsim.errors import FedsimError

# Attacks are bounded from above and seldom use their share of the risk; the p-values of tests
# are exact, and far smaller than their share where there is what they look for.
SHARE_OF_CHECKS = 0.1


@dataclass(frozen=True)
class Verdict:
    """What an audit found.

    Attributes
    ----------
    claim : Claim
        Of the runs of the first attack.
    two_worlds : tuple of TwoWorlds
        Attacks in two worlds.
    checks : tuple of Finding
        Of whole runs: noise, draws, what one client moves, what is charged.
    confidence : float
        Probability with which a true claim is accepted, at least.
    one_run : OneRun or None
        The attack in one run.
    """

    claim: Claim
    two_worlds: tuple[TwoWorlds, ...]
    checks: tuple[Finding, ...]
    confidence: float
    one_run: OneRun | None = None

    @property
    def attacks(self) -> tuple[TwoWorlds | OneRun, ...]:
        """All of them."""
        return self.two_worlds if self.one_run is None else (*self.two_worlds, self.one_run)

    @property
    def risk(self) -> float:
        """Of each attack: they share the verdict's equally (Bonferroni)."""
        return risk_of_attack(self.confidence, len(self.attacks), bool(self.checks))

    @property
    def risk_of_check(self) -> float:
        """Of each check: together they have a tenth of the risk, and all of it without attacks."""
        share = SHARE_OF_CHECKS if self.attacks else 1.0
        return (1 - self.confidence) * share / max(len(self.checks), 1)

    @property
    def refuting(self) -> tuple[str, ...]:
        """Attacks and checks that detected a violation."""
        names = [attack.name for attack in self.attacks if attack.p_value <= self.risk]
        return (*names, *map(str, self.failed))

    @property
    def failed(self) -> tuple[Finding, ...]:
        """Checks whose p-value is too small for chance."""
        return tuple(check for check in self.checks if check.refutes(self.risk_of_check))

    @property
    def accepted(self) -> bool:
        """Whether no attack and no check refuted the claim."""
        return not self.refuting

    @property
    def epsilon_bound(self) -> float:
        """Largest lower bound on epsilon that an attack in two worlds proved."""
        return max((attack.epsilon_bound for attack in self.two_worlds), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """What it says, as JSON has it."""
        return {
            "accepted": self.accepted,
            "verdict": str(self),
            "confidence": self.confidence,
            "epsilon": self.claim.epsilon if math.isfinite(self.claim.epsilon) else None,
            "delta": self.claim.delta,
            "epsilon-at-least": self.epsilon_bound,
            "violations": [
                {"of": f.part, "test": f.name, "found": f.measured, "likely-cause": f.cause,
                 "p": f.p_value}
                for f in self.failed
            ],
            "attacks": [
                {"name": attack.name, "p": attack.p_value, "violation": attack.p_value <= self.risk}
                for attack in self.attacks
            ],
            "tests": len(self.checks),
        }  # fmt: skip

    def __str__(self) -> str:
        claimed = f"(epsilon, delta) = ({self.claim.epsilon:.3g}, {self.claim.delta:g})"
        level = f"at {self.confidence:.4g} confidence."
        if not self.accepted:
            return f"Violation of {claimed} detected by {' and '.join(self.refuting)}, {level}"
        made = [f"{len(self.attacks)} attacks"] * bool(self.attacks)
        made += [f"{len(self.checks)} tests"] * bool(self.checks)
        return f"No violation of {claimed} detected by {' and '.join(made)}, {level}"


def risk_of_attack(confidence: float, attacks: int, checked: bool) -> float:
    """The share of each attack in the risk that a verdict is wrong."""
    return (1 - confidence) * (1 - SHARE_OF_CHECKS * checked) / max(attacks, 1)


@check_arguments
def audit(
    strategy: StrategyFactory,
    *,
    rounds: int = 1,
    runs: int = 1000,
    worlds: Sequence[World] = WORLDS,
    canaries: int = 512,
    one_run: StrategyTarget | None = None,
    full: StrategyTarget | None = None,
    checks: bool = True,
    extra: Sequence[Finding] = (),
    confidence: float = 0.99,
    seed: int = 1,
    deep: bool = False,
    tick: Callable[[int], None] = lambda runs: None,
) -> Verdict:
    """Attack the claim that a strategy's own ledger makes, and test what it takes for granted.

    *Checks* examine whole runs: is released noise white, normal and new in every round, are
    clients drawn as the ledger says, how far does one client move the sum, whatever it sends,
    does it decide anything else, is every release charged. *Two worlds*: the strategy is run
    ``runs`` times without and ``runs`` times with a canary client, on a `LocalGrid`; score and
    threshold are chosen on one half and errors counted on the other. *One run*: every canary
    is in or out by a coin, and the coins are guessed.

    Parameters
    ----------
    strategy : callable
        From a seed, or None for the system's entropy, to a fresh `DPFedAvg`.
    rounds : int
        Of each run of the two worlds; mechanisms that adapt show it from the second.
    worlds : sequence of World
    canaries : int
        Of the one run, at most; 0 leaves it out.
    one_run, full : StrategyTarget, optional
        What the one run and the checks do, if not the same: they can afford more rounds.
    checks : bool
        Whether to test whole runs.
    extra : sequence of Finding
        Of more checks, made by the caller, that share the risk.
    confidence : float
        Probability with which a true claim is accepted, at least.
    seed : int
        Of all runs; another seed makes another audit.
    deep : bool
        Whether checks take ten times the releases where few seeds would show.
    tick : callable
        Called with a number of runs made, now and then.

    Raises
    ------
    FedsimError
        If the ledger claims nothing (its epsilon is infinite), or an argument is impossible.
    """
    if not 0 < confidence < 1:
        raise FedsimError(f"confidence is {confidence}; it must lie strictly between 0 and 1.")
    if runs < 20 and worlds:
        raise FedsimError(f"runs is {runs}; it must be at least 20.")
    number = len(worlds) + (canaries > 0)
    if not number and not checks:
        raise FedsimError("there is neither a world nor a canary; an audit needs one of them.")
    population = strategy(seed).plan.sampler.population or 0
    if population < 2:
        raise FedsimError(
            f"cohort.population is {population}; an audit needs a canary and another client."
        )
    risk = risk_of_attack(confidence, number, checks or bool(extra))
    target = StrategyTarget(strategy, rounds=rounds)
    attacks: list[TwoWorlds] = []
    guessed: OneRun | None = None
    with silenced_logs():
        results = list(extra)
        if checks:
            evidence = ClientEvidence(full or target, seed, deep)
            # Before any run: without a claim there is nothing to check.
            evidence.claim.curve(0.5)
            whole = replace(evidence, target=with_whole_model(evidence.target))
            results += findings(whole.checks())
        for index, world in enumerate(worlds):
            attacks.append(attack(target, world, runs, risk, seed + index, tick))
        if checks and worlds:
            results += findings([(lambda: _differences(target, attacks), catalogue.SEEDS)])
        if canaries:
            canaries = min(canaries, population)
            d = 2 ** math.ceil(math.log2(max(canaries, 8)))
            model = (one_run or target).with_model(_same_names(target.start, d))
            guessed = guess_coins(model, canaries, risk, seed)
    first = attacks[0] if attacks else guessed
    claim = Claim((target.event.over(rounds),)) if first is None else first.claim
    return Verdict(claim, tuple(attacks), tuple(results), confidence, guessed)


def _differences(target: StrategyTarget, worlds: Sequence[TwoWorlds]) -> tuple[Floats, str]:
    """Differences of coordinates of the first layer: a world's rows are the same at each.

    So there is noise alone in them, and each run has a seed of its own.
    """
    d, layer = target.layout.d, target.columns[0]
    moves = np.concatenate([attack.moves.reshape(-1, d) for attack in worlds])
    differences = np.diff(moves[:, layer])
    differences = differences[(differences != 0).any(1)]
    return differences, f"{len(differences):,} rounds of runs with seeds of their own"


@contextmanager
def silenced_logs() -> Iterator[None]:
    """Without a line for each round, and warnings of clients that fail on purpose."""
    logs = [logging.getLogger(name) for name in ("fedsim", "flwr")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _same_names(start: Parameters, d: int) -> Parameters:
    """``d`` parameters under the same names."""
    sizes = [d // len(start)] * len(start)
    sizes[0] += d - sum(sizes)
    return {
        name: torch.zeros(size, dtype=torch.float64)
        for name, size in zip(start, sizes, strict=True)
    }
