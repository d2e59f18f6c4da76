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

from fedsim.audit import claim as ledger
from fedsim.audit import noise_checks as noise
from fedsim.audit import plan_checks as plan
from fedsim.audit import sampling_checks as sampling
from fedsim.audit.bound_checks import bounded
from fedsim.audit.checks import Check, Finding, Floats, Part
from fedsim.audit.claim import Claim
from fedsim.audit.clients import WORLDS, World
from fedsim.audit.evidence import ClientEvidence, with_whole_model
from fedsim.audit.local_training import line_for_every_round, passes
from fedsim.audit.metrics_release import line_for_every_evaluation, moved_metrics
from fedsim.audit.neighbouring_runs import no_fault
from fedsim.audit.one_run import OneRun, guess_coins
from fedsim.audit.target import Parameters, StrategyFactory, StrategyTarget
from fedsim.audit.two_world import TwoWorlds, attack, errors_allowed
from fedsim.errors import FedsimError

# Attacks are bounded from above and seldom use their share of the risk; the p-values of tests
# are exact, and far smaller than their share where there is what they look for.
SHARE_OF_CHECKS = 0.1

fault = no_fault
# fmt: off
_TABLE: dict[Part, tuple[tuple[str, str, Callable[..., Finding], str], ...]] = {
    # Name, what of the evidence is tested, by what (its docstring says for what), likely cause.
    "noise": (
        ("presence", "units", noise.presence, "noise is left out"),
        ("size in each round", "alone.noise", noise.round_sizes, "noise of another size"),
        ("size in each layer", "alone.noise", noise.layer_sizes, "another size in a layer"),
        ("size in each coordinate", "alone.noise", noise.coordinate_sizes,
         "a coordinate without noise"),
        ("size in each direction", "alone.noise", noise.direction_sizes,
         "a direction without noise"),
        ("size in any direction", "alone.small_noise", noise.covariance,
         "a direction without noise"),
        ("mean", "alone.noise", noise.means, "something is added beside noise"),
        ("accumulated over rounds", "alone.noise", noise.accumulated,
         "noise of one round is cancelled or repeated in another"),
        ("extreme values", "alone.noise", noise.extremes, "noise is truncated"),
        ("shape of the distribution", "alone.noise", noise.shape, "not Gaussian"),
        ("exact repeats", "alone.noise", noise.exact_repeats, "noise is used again"),
        ("pairs of rounds", "alone.noise", noise.round_pairs, "noise is used again"),
        ("pairs of rounds, without signs", "alone.noise", noise.round_pairs_without_signs,
         "noise is used again with other signs"),
        ("pairs of coordinates", "alone.noise", noise.coordinate_pairs,
         "coordinates share noise"),
        ("shifts in rounds and coordinates", "alone.noise", noise.shifts,
         "overlapping streams of random numbers"),
        ("size against the cohort's", "alone.noise", noise.against_sizes,
         "noise depends on who was sampled"),
        ("rounding to the grid", "alone.grid", noise.rounding, "low bits show the sum"),
        ("equal values", "alone.grid.on_grid", noise.equal_values, "noise has too few values"),
        ("low bits", "alone.grid.on_grid", noise.low_bits, "low bits show the sum"),
        ("low bits in pairs of rounds", "alone.grid.on_grid", noise.low_bits_of_pairs,
         "low bits are used again"),
        ("noise of another run", "private.rival", noise.pairs, "noise is keyed by the seed alone"),
        ("noise with system entropy", "present.system_noise", plan.system_noise, "too few seeds"),
        ("noise of different seeds", "differences", noise.repeats, "too few seeds"),
        ("resume", "present.resumed", plan.same_after_resume, "a resumed run draws noise again"),
        ("earlier rounds", "in_layers.canaries",
         fault("earlier rounds", "the same in rounds without the canary"),
         "noise depends on updates"),
        ("addresses of draws", "addresses", plan.addresses_once, "a random number is used twice"),
    ),
    "sampler": (
        ("sampled ids", "present.sampled", sampling.ids, "sampling with replacement"),
        ("charged rate", "present.sampled.unequal", sampling.charged_rate,
         "more is sampled than charged"),
        ("sizes", "present.sampled.known", sampling.sizes, "another sampler, or rate"),
        ("spread of sizes", "present.sampled.alike", sampling.spread,
         "cohorts of a fixed size, announced as Poisson"),
        ("inclusion frequencies", "present.sampled.at_random", sampling.frequencies,
         "some are sampled more often"),
        ("pairs sampled together", "present.sampled.at_random", sampling.together,
         "rows are not drawn independently"),
        ("overlap of rounds", "present.sampled.at_random", sampling.overlaps,
         "a draw is used again"),
        ("rounds after being sampled", "present.sampled.alike", sampling.succession,
         "rounds are not drawn independently"),
        ("periodicity", "present.sampled.alike", sampling.periodicity,
         "rounds are not drawn independently"),
        ("declared inclusion probabilities", "present.declared_law", sampling.declared_law,
         "the sampler does not follow its own law"),
        ("passes", "passes", passes, "batches overlap within a pass"),
        ("draws and data", "present.same_seed", plan.same_cohorts,
         "updates influence who is sampled"),
        ("cohorts with system entropy", "present.system_cohorts", plan.system_cohorts,
         "too few seeds"),
        ("other clients", "in_layers.canaries",
         fault("other clients", "the same other clients are sampled"),
         "updates influence who is sampled"),
    ),
    "bound": (
        ("what each {row} adds", "present.added", bounded, "rows longer than C pass"),
        ("what several {row}s add", "present.several", bounded, "rows longer than C pass"),
        ("what one {row} moves", "in_layers.moved", bounded,
         "rows longer than C pass, or noise is too small"),
        ("what one client moves, released scalars included", "in_layers.canaries.moved_together",
         bounded, "a released scalar has too little noise"),
        ("messages", "in_layers.canaries",
         fault("messages", "updates in messages add what blocks of rows add"), "rows count twice"),
        ("what one client's metrics move", "evaluated", moved_metrics,
         "numbers are not clamped to their ranges"),
        ("what one example moves in the model itself", "own_examples", bounded,
         "gradients are not per example"),
    ),
    "plan": (
        ("several fail at once", "present.failing", plan.same_after_failures,
         "the denominator is counted"),
        ("releases", "in_layers.canaries", fault("releases", "every round is released"),
         "a client decides whether a round is released"),
        ("slowness", "in_layers.canaries",
         fault("slowness", "a slow client excludes no other client"), "a common deadline"),
        ("traces", "in_layers.canaries",
         fault("traces", "a client that adds nothing leaves no trace"),
         "the denominator is counted"),
        ("nothing but the sum", "in_layers.equal_sums", plan.nothing_but_sums,
         "something is released beside the sum"),
        ("what else leaves a round", "in_layers.noise_only", plan.what_leaves,
         "statistics are released without noise"),
        ("what else leaves a round", "in_layers.reports",
         fault("reports", "the same whatever an example is"),
         "statistics are released without noise"),
        ("rounds of each {row}", "present.sampled.planned", plan.participations,
         "rows are in more rounds than the plan counts on"),
        ("rounds", "charges", ledger.rounds_as_planned, "data decide when a run ends"),
        ("two worlds", "worlds", errors_allowed, "noise is too small"),
    ),
    "ledger": (
        ("a line for every release", "charges", ledger.line_for_every_release,
         "a release is not charged"),
        ("what a line says", "charges", ledger.event_of_every_line, "another event is charged"),
        ("one line, one release", "charges", ledger.one_line_each, "a release is charged twice"),
        ("a line for every evaluation", "evaluated", line_for_every_evaluation,
         "an evaluation is not charged"),
        ("a line for every round", "lines", line_for_every_round,
         "a release is not charged"),
        ("charges", "in_layers.canaries", fault("charges", "the same is charged"),
         "updates influence what is charged"),
        ("epsilon of the run", "private.promised", ledger.promise, "another event is charged"),
        ("epsilon of the events", "claim", ledger.accounting, "the accountant counts too little"),
        ("budget", "budget", ledger.budget, "a budget does not stop the run in time"),
    ),
}
# fmt: on
CHECKS = tuple(Check(part, *row) for part, rows in _TABLE.items() for row in rows)


def findings(evidence: object, *names: str) -> list[Finding]:
    """What all checks, or those of these names, find in evidence of one kind."""
    chosen = (check for check in CHECKS if not names or check.name in names)
    return [finding for check in chosen for finding in check.findings(evidence)]


@dataclass(frozen=True)
class Verdict:
    """What an audit found.

    Attributes
    ----------
    claim : Claim
        Of the runs of the first attack.
    attacks : tuple of TwoWorlds and OneRun
    checks : tuple of Finding
        Of whole runs: noise, draws, what one client moves, what is charged.
    confidence : float
        Probability with which a true claim is accepted, at least.
    """

    claim: Claim
    attacks: tuple[TwoWorlds | OneRun, ...]
    checks: tuple[Finding, ...]
    confidence: float

    @property
    def two_worlds(self) -> tuple[TwoWorlds, ...]:
        """The attacks in two worlds."""
        return tuple(attack for attack in self.attacks if isinstance(attack, TwoWorlds))

    @property
    def one_run(self) -> OneRun | None:
        """The attack in one run."""
        return next((attack for attack in self.attacks if isinstance(attack, OneRun)), None)

    @property
    def risk(self) -> float:
        """Of each attack: they share the verdict's equally (Bonferroni)."""
        return _risk_of_attack(self.confidence, len(self.attacks), bool(self.checks))

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


def _risk_of_attack(confidence: float, attacks: int, checked: bool) -> float:
    return (1 - confidence) * (1 - SHARE_OF_CHECKS * checked) / max(attacks, 1)


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
    risk = _risk_of_attack(confidence, number, checks or bool(extra))
    target = StrategyTarget(strategy, rounds=rounds)
    attacks: list[TwoWorlds | OneRun] = []
    with silenced_logs():
        results = list(extra)
        if checks:
            evidence = ClientEvidence(full or target, seed, deep)
            # Before any run: without a claim there is nothing to check.
            evidence.claim[0].curve(0.5)
            results += findings(replace(evidence, target=with_whole_model(evidence.target)))
        for index, world in enumerate(worlds):
            attacks.append(attack(target, world, runs, risk, seed + index, tick))
        if checks and worlds:
            results += findings(_Attacked(target, attacks))
        if canaries:
            canaries = min(canaries, population)
            d = 2 ** math.ceil(math.log2(max(canaries, 8)))
            model = (one_run or target).with_model(_same_names(target.start, d))
            attacks.append(guess_coins(model, canaries, risk, seed))
    claim = attacks[0].claim if attacks else Claim((target.event.over(rounds),))
    return Verdict(claim, tuple(attacks), tuple(results), confidence)


@dataclass(frozen=True)
class _Attacked:
    """Evidence: releases of the attacks' runs, each of a seed of its own."""

    target: StrategyTarget
    attacks: Sequence[TwoWorlds | OneRun]

    @property
    def differences(self) -> tuple[Floats, str]:
        """Differences of coordinates of the first layer: a world's rows are the same at each.

        So there is noise alone in them.
        """
        d, layer = self.target.layout.d, self.target.columns[0]
        worlds = [attack for attack in self.attacks if isinstance(attack, TwoWorlds)]
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
