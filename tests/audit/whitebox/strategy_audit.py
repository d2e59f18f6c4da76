"""The white-box audit: attacks and checks of a strategy's claim, and the verdict that follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from whitebox import catalogue
from whitebox.bound_checks import changes_shape
from whitebox.clients import WORLDS, World
from whitebox.evidence import FEW_ROUNDS, MAX_ROUNDS, MEDIUM_PARAMETERS, ClientEvidence
from whitebox.ledger_checks import common_claim
from whitebox.one_run import guess_coins
from whitebox.target import Parameters, StrategyFactory, StrategyTarget, Target, parameters

from fedsim.array_types import Floats
from fedsim.audit.claim import Claim
from fedsim.audit.findings import Finding, findings
from fedsim.audit.two_world import Attack, distinguish
from fedsim.audit.verdict import Verdict, check_numbers, risk_of_attack, silenced_logs
from fedsim.errors import FedsimError
from fedsim.randomness import Purpose, Randomness

Tick = Callable[[int], None]
MAX_PARAMETERS, MAX_VALUES = 2048, 2**18
"""Parameters of the model in whole runs, and the most values of one run that they may give."""


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
    attacks += [guessed] * (guessed is not None)
    first = attacks[0] if attacks else None
    claim = (
        Claim((target.event.over_rounds(rounds),), target.delta) if first is None else first.claim
    )
    return Verdict(claim, tuple(attacks), tuple(results), confidence)


def _with_whole_model(target: StrategyTarget) -> StrategyTarget:
    """The target with as many parameters as whole runs can afford, to see more noise."""
    target = target.at_most(MAX_ROUNDS).with_model(parameters(64))
    states = target.at_most(FEW_ROUNDS).observe(target.silent_clients(), 1).states
    # Shares of noise are drawn for each client, and changing units computed in each round.
    slow = target.shares or changes_shape(states)
    many = target.rounds > MAX_VALUES // MAX_PARAMETERS
    return target.with_model(parameters(MEDIUM_PARAMETERS if slow or many else MAX_PARAMETERS))


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


def _same_names(start: Parameters, d: int) -> Parameters:
    """A model of ``d`` parameters with the same names."""
    sizes = [d // len(start)] * len(start)
    sizes[0] += d - sum(sizes)
    return {
        name: torch.zeros(size, dtype=torch.float64)
        for name, size in zip(start, sizes, strict=True)
    }


def attack(target: Target, world: World, runs: int, risk: float, seed: int, tick: Tick) -> Attack:
    """Make ``runs`` runs without and ``runs`` runs with the canary, and test between them.

    Parameters
    ----------
    risk : float
        Probability with which the box and the bound may each be wrong.
    tick : callable
        Called with the number of runs just made.
    """
    d = target.layout.d
    draws = Randomness(seed).generator(Purpose.AUDIT, level="run")
    seeds = draws.integers(2**63, size=(2, runs))
    tables: list[Floats] = []
    claims: set[Claim] = set()
    for side, present in enumerate((False, True)):
        clients = target.world(world, present=present)
        for number in range(runs):
            observed = target.observe(clients, int(seeds[side, number]))
            tables.append(target.whitened(observed.table()))
            claims.add(Claim.from_entries(observed.entries, observed.delta))
            tick(1)
    claim = common_claim(claims)
    shown = _stacked(tables)
    direction = world.canary(d).numpy()
    result = distinguish(world.name, shown[:runs], shown[runs:], direction, claim, risk)
    return replace(result, moves=shown[:, :, :d])


def _stacked(tables: list[Floats]) -> Floats:
    """Stack tables to ``[runs, rounds, width]``; runs without a successful round are padded."""
    width = max(table.shape[1] for table in tables)
    return np.stack([np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in tables])
