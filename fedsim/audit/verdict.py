"""The audit: attack a strategy's claim from several sides, and say whether it is violated."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedsim.audit.checks import Check
from fedsim.audit.claim import Claim
from fedsim.audit.conformance import conformance, model_for
from fedsim.audit.ledger_checks import accounting_check
from fedsim.audit.neighbouring_runs import pair_checks
from fedsim.audit.noise_checks import repeats
from fedsim.audit.observation import PARAMETERS, Parameters, StrategyFactory, Target, columns
from fedsim.audit.one_run import OneRun, guess_coins
from fedsim.audit.two_world import TwoWorlds, attack
from fedsim.audit.worlds import WORLDS, World
from fedsim.errors import FedsimError

# Attacks are bounded from above and seldom use their share of the risk; the p-values of tests
# are exact, and what they look for is far beyond doubt where it is there.
SHARE_OF_CHECKS = 0.1


@dataclass(frozen=True)
class Verdict:
    """What an audit found.

    Attributes
    ----------
    claim : Claim
        Of the runs of the two-world attacks, or of the one run if there were none.
    two_worlds : tuple of TwoWorlds
    one_run : OneRun or None
    one_run_claim : Claim or None
        The one run may have more rounds, and then claims something of its own.
    checks : tuple of Check
        Of whole runs: noise, draws, what one client moves, what is charged.
    confidence : float
        Probability with which a true claim is accepted, at least.
    rounds, runs : int
        Of the two-world attacks; ``runs`` in each of a world's two halves.
    """

    claim: Claim
    two_worlds: tuple[TwoWorlds, ...]
    one_run: OneRun | None
    one_run_claim: Claim | None
    checks: tuple[Check, ...]
    confidence: float
    rounds: int
    runs: int

    @property
    def attacks(self) -> int:
        """Number of attacks that were made."""
        return len(self.two_worlds) + (self.one_run is not None)

    @property
    def risk(self) -> float:
        """Of each attack: they share the verdict's between them (Bonferroni)."""
        return _risk_of_attack(self.confidence, self.attacks, bool(self.checks))

    @property
    def risk_of_check(self) -> float:
        """Of each check, from what is left to them."""
        share = SHARE_OF_CHECKS if self.attacks else 1.0
        return (1 - self.confidence) * share / max(len(self.checks), 1)

    @property
    def refuting(self) -> tuple[str, ...]:
        """Attacks and checks that no system for which the claim is true would have failed."""
        names = [attack.world for attack in self.two_worlds if attack.p_value <= self.risk]
        if self.one_run is not None and self.one_run.p_value <= self.risk:
            names.append("one run")
        return (*names, *(str(check) for check in self.failed))

    @property
    def failed(self) -> tuple[Check, ...]:
        """Checks whose p-value is too small for chance."""
        return tuple(check for check in self.checks if check.refutes(self.risk_of_check))

    @property
    def accepted(self) -> bool:
        """Whether no attack and no check refuted the claim."""
        return not self.refuting

    @property
    def epsilon_bound(self) -> float:
        """Largest lower bound on epsilon that an attack on `claim` proved."""
        return max((attack.epsilon_bound for attack in self.two_worlds), default=0.0)

    def __str__(self) -> str:
        claimed = f"(epsilon, delta) = ({self.claim.epsilon:.3g}, {self.claim.delta:g})"
        level = f"at {self.confidence:.4g} confidence."
        if not self.accepted:
            return f"Violation of {claimed} detected by {' and '.join(self.refuting)}, {level}"
        made = [f"{self.attacks} attacks"] * (self.attacks > 0)
        made += [f"{len(self.checks)} tests"] * bool(self.checks)
        return f"No violation of {claimed} detected by {' and '.join(made)}, {level}"


def _risk_of_attack(confidence: float, attacks: int, checked: bool) -> float:
    return (1 - confidence) * (1 - SHARE_OF_CHECKS * checked) / max(attacks, 1)


def audit(
    strategy: StrategyFactory,
    *,
    rounds: int = 1,
    runs: int = 1000,
    worlds: Sequence[World] = WORLDS,
    canaries: int = 512,
    one_run: Target | None = None,
    full: Target | None = None,
    checks: bool = True,
    extra: Sequence[Check] = (),
    confidence: float = 0.99,
    start: Parameters = PARAMETERS,
    seed: int = 1,
    deep: bool = False,
    tick: Callable[[int], None] = lambda runs: None,
) -> Verdict:
    """Attack the claim that a strategy's own ledger makes, and test what it takes for granted.

    *Checks* look at whole runs: is released noise white, normal and new in every round, are
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
    one_run, full : Target, optional
        What the one run and the checks do, if not the same: they can afford more rounds.
    checks : bool
        Whether to look at whole runs.
    extra : sequence of Check
        More checks, made by the caller, that share the risk.
    confidence : float
        Probability with which a true claim is accepted, at least.
    start : mapping of name to Tensor
        Initial parameters of the two-world runs.
    seed : int
        Of all runs; another one makes another audit.
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
    attacks = len(worlds) + (canaries > 0)
    if not attacks and not checks:
        raise FedsimError("there is neither a world nor a canary; an audit needs one of them.")
    population = strategy(seed).cohort.population or 0
    if population < 2:
        raise FedsimError(
            f"cohort.population is {population}; an audit needs a canary and somebody else."
        )
    risk = _risk_of_attack(confidence, attacks, checks or bool(extra))
    target = Target(strategy, rounds)
    full = full or target
    claim: Claim | None = None
    with silenced_logs():
        results = [*extra, *(_checks(full, seed, deep) if checks else ())]
        attacked = []
        for number, world in enumerate(worlds):
            result, claim = attack(target, world, start, runs, risk, seed + number, tick)
            attacked.append(result)
        if checks and attacked:
            results.append(_noise_of_many_seeds(attacked, start))
        guessed = guessed_claim = None
        if canaries:
            canaries = min(canaries, population)
            d = 2 ** math.ceil(math.log2(max(canaries, 8)))
            guessed, guessed_claim = guess_coins(
                one_run or target, _same_names(start, d), canaries, risk, seed
            )
    claim = claim or guessed_claim or Claim((target.event,) * rounds)
    return Verdict(
        claim, tuple(attacked), guessed, guessed_claim, tuple(results), confidence, rounds, runs
    )


def _noise_of_many_seeds(attacked: Sequence[TwoWorlds], start: Parameters) -> Check:
    """Whether any two of the attacks' runs, each of a seed of its own, have the same noise.

    A world's rows are the same at every coordinate of the first layer: in differences of
    coordinates there is noise alone.
    """
    layer = columns(start)[0]
    moves = np.concatenate(
        [attack.moves.reshape(-1, attack.moves.shape[-1]) for attack in attacked]
    )
    differences = np.diff(moves[:, layer])
    differences = differences[(differences != 0).any(1)]
    check = repeats(differences, f"{len(differences):,} rounds of runs with seeds of their own")
    return replace(check, name="noise of many seeds")


def _checks(full: Target, seed: int, deep: bool) -> list[Check]:
    start = model_for(full)
    claim = Claim((full.event.times(full.rounds),), full.settings.delta)
    # Before anything is run: without a claim there is nothing to check.
    claim.curve(0.5)
    results, noise = conformance(full, start, seed, deep=deep)
    if noise.stds.all():
        results += pair_checks(full, start, noise, seed)
    return [*results, accounting_check(claim, seed)]


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
    names = list(start)
    sizes = [d // len(names)] * len(names)
    sizes[0] += d - sum(sizes)
    return {
        name: torch.zeros(size, dtype=torch.float64)
        for name, size in zip(names, sizes, strict=True)
    }
