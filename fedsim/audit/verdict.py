"""The audit: attacks and checks of a strategy's claim, and the verdict that follows."""

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
from fedsim.audit.bound_checks import changes_shape
from fedsim.audit.checks import Finding, Floats, findings
from fedsim.audit.claim import Claim
from fedsim.audit.clients import WORLDS, World
from fedsim.audit.evidence import FEW_ROUNDS, MEDIUM_PARAMETERS, MOST_ROUNDS, ClientEvidence
from fedsim.audit.one_run import guess_coins
from fedsim.audit.target import Parameters, StrategyFactory, StrategyTarget, parameters
from fedsim.audit.two_world import Attack, attack
from fedsim.errors import FedsimError

# Checks get a small share: where there is a violation, their exact p-values are far below it.
# Attacks need more, as their bounds are conservative.
SHARE_OF_CHECKS = 0.1
MOST_PARAMETERS, MOST_VALUES = 2048, 2**18
"""Parameters of the model in whole runs, and the most values of one run that they may give."""


@dataclass(frozen=True)
class Verdict:
    """Result of an audit.

    Attributes
    ----------
    claim : Claim
        Claim of the first attack's runs.
    two_worlds : tuple of Attack
        Attacks in two worlds.
    checks : tuple of Finding
        Checks of whole runs: noise, sampling, one client's influence, charges.
    confidence : float
        Lower bound on the probability that a true claim is accepted.
    one_run : Attack or None
        The attack in one run.
    """

    claim: Claim
    two_worlds: tuple[Attack, ...]
    checks: tuple[Finding, ...]
    confidence: float
    one_run: Attack | None = None

    @property
    def attacks(self) -> tuple[Attack, ...]:
        """All attacks."""
        return self.two_worlds if self.one_run is None else (*self.two_worlds, self.one_run)

    @property
    def risk(self) -> float:
        """Risk of each attack: they share the attacks' part of the risk equally (Bonferroni)."""
        return risk_of_attack(self.confidence, len(self.attacks), bool(self.checks))

    @property
    def risk_of_check(self) -> float:
        """Risk of each check: together they have a tenth of the risk, without attacks all."""
        share = SHARE_OF_CHECKS if self.attacks else 1.0
        return (1 - self.confidence) * share / max(len(self.checks), 1)

    @property
    def refuting(self) -> tuple[str, ...]:
        """Names of the attacks and checks that detected a violation."""
        attacks = [attack.finding for attack in self.attacks]
        names = [finding.name for finding in attacks if finding.refutes(self.risk)]
        return (*names, *map(str, self.failed))

    @property
    def failed(self) -> tuple[Finding, ...]:
        """Checks that detected a violation."""
        return tuple(check for check in self.checks if check.refutes(self.risk_of_check))

    @property
    def accepted(self) -> bool:
        """Whether no attack and no check refuted the claim."""
        return not self.refuting

    @property
    def epsilon_bound(self) -> float:
        """Largest lower bound on epsilon of the attacks in two worlds."""
        return max((attack.epsilon_bound for attack in self.two_worlds), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """The verdict for JSON."""
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
                {"name": f.name, "p": f.p_value, "violation": f.refutes(self.risk)}
                for f in (attack.finding for attack in self.attacks)
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
    """Each attack's share of the risk that a true claim is rejected."""
    return (1 - confidence) * (1 - SHARE_OF_CHECKS * checked) / max(attacks, 1)


def check_numbers(confidence: float, runs: int | None, canaries: int = 0) -> None:
    """Refuse arguments with which an audit says nothing; ``runs`` is None without worlds."""
    if not 0 < confidence < 1:
        raise FedsimError(f"confidence is {confidence}; it must lie strictly between 0 and 1.")
    if runs is not None and runs < 20:
        raise FedsimError(f"runs is {runs}; it must be at least 20.")
    if canaries < 0:
        raise FedsimError(f"canaries is {canaries}; it must be at least 0.")


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
    """Attack the claim of a strategy's ledger, and test the assumptions behind it.

    *Checks* examine whole runs: whether released noise is white, normal and new in every round;
    whether clients are sampled as the ledger says; how far one client can move the sum, and
    whether it influences anything else; whether every release is charged. *Two worlds*: the
    strategy is run ``runs`` times without and ``runs`` times with a canary client, on a
    `LocalGrid`; score and threshold are chosen on one half, and errors counted on the other.
    *One run*: each canary is included by a coin flip, and the coins are guessed.

    Parameters
    ----------
    strategy : callable
        Makes a fresh `DPFedAvg` from a seed, or from None for the system's entropy.
    rounds : int
        Rounds of each run in two worlds; mechanisms that adapt do so from the second.
    worlds : sequence of World
    canaries : int
        Largest number of canaries in the one run; 0 leaves that attack out.
    one_run, full : StrategyTarget, optional
        Other targets for the one run and for the checks, which can afford more rounds.
    checks : bool
        Whether to check whole runs.
    extra : sequence of Finding
        Findings of the caller's own checks, which share the risk.
    confidence : float
        Lower bound on the probability that a true claim is accepted.
    seed : int
        Seed of all runs; another seed makes another audit.
    deep : bool
        Whether to make ten times the releases in checks for too few seeds.
    tick : callable
        Called now and then with the number of runs just made.

    Raises
    ------
    FedsimError
        If the ledger claims nothing (its epsilon is infinite), or an argument is not allowed.
    """
    check_numbers(confidence, runs if worlds else None, canaries)
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
    attacks: list[Attack] = []
    guessed: Attack | None = None
    with silenced_logs():
        results = list(extra)
        if checks:
            evidence = ClientEvidence(full or target, seed, deep)
            # Raises before any run if there is no claim to check.
            evidence.claim.curve(0.5)
            whole = replace(evidence, target=_with_whole_model(evidence.target))
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
    claim = Claim((target.event.over(rounds),), target.delta) if first is None else first.claim
    return Verdict(claim, tuple(attacks), tuple(results), confidence, guessed)


def _with_whole_model(target: StrategyTarget) -> StrategyTarget:
    """The target with as many parameters as whole runs can afford, to see more noise."""
    target = target.at_most(MOST_ROUNDS).with_model(parameters(64))
    states = target.at_most(FEW_ROUNDS).observe(target.silent_clients(), 1).states
    # Shares of noise are drawn for each client, and changing units computed in each round.
    slow = target.shares or changes_shape(states)
    many = target.rounds > MOST_VALUES // MOST_PARAMETERS
    return target.with_model(parameters(MEDIUM_PARAMETERS if slow or many else MOST_PARAMETERS))


def _differences(target: StrategyTarget, worlds: Sequence[Attack]) -> tuple[Floats, str]:
    """Differences of neighbouring coordinates of the first layer, and a description.

    A world's rows are equal along these, so that the differences are noise alone. Each run has
    its own seed.
    """
    d, layer = target.layout.d, target.columns[0]
    moves = np.concatenate([attack.moves.reshape(-1, d) for attack in worlds])
    differences = np.diff(moves[:, layer])
    differences = differences[(differences != 0).any(1)]
    return differences, f"{len(differences):,} rounds of runs with seeds of their own"


@contextmanager
def silenced_logs() -> Iterator[None]:
    """Silence logs of rounds, and warnings about clients that fail on purpose."""
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
    """A model of ``d`` parameters with the same names."""
    sizes = [d // len(start)] * len(start)
    sizes[0] += d - sum(sizes)
    return {
        name: torch.zeros(size, dtype=torch.float64)
        for name, size in zip(start, sizes, strict=True)
    }
