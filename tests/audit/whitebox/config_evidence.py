"""Evidence and checks of a config: its own run and examples, and smaller federations like it.

Two checks use the config's own data and model: a few rounds of the run, in which every address of
random draws is recorded; and gradients of its own examples, good and bad, through its model, loss
and path. All others use strategies like the config's, with synthetic clients.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from whitebox import catalogue
from whitebox.evidence import FEW_ROUNDS, MEDIUM_PARAMETERS
from whitebox.evidence import MAX_ROUNDS as MAX_WHOLE_ROUNDS
from whitebox.ledger_checks import AFFORDABLE_ROUNDS, budget_between
from whitebox.local_training import ExampleEvidence, TrainerTarget
from whitebox.target import StrategyFactory, StrategyTarget, parameters

from fedsim.array_types import Floats
from fedsim.audit.findings import SampleChecks
from fedsim.audit.user_checks import ROWS
from fedsim.cohorts import FixedCohort
from fedsim.config import RunConfig
from fedsim.config.plan import cohort
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.privacy import Event
from fedsim.randomness import Address, Randomness
from fedsim.runs import factories
from fedsim.runs.resolve import Resolved, make_strategy, resolve
from fedsim.runs.runner import drive
from fedsim.strategies import DPFedAvg

_log = logging.getLogger("fedsim")

# Limits: more clients cost time and detect little more.
MAX_CLIENTS = 1000
MAX_EXAMPLES = 512
OWN_ROUNDS, OWN_STEPS = 2, 2
"""Number of rounds, and of each client's steps, of the config's own run."""


@dataclass(frozen=True, eq=False)
class ConfigEvidence:
    """A config's claim, samples for checks without attacks, and smaller federations."""

    resolved: Resolved
    seed: int

    def checks(self) -> Iterator[SampleChecks]:
        """Samples and checks without attacks, at both levels."""
        yield lambda: own_addresses(self.config), catalogue.ADDRESSES
        if self.resolved.trainer.privacy is not None:
            yield lambda: self.resolved, ROWS
        if self.config.private:
            yield lambda: self.same_seed_other_noise, catalogue.ANOTHER_RUN
            yield lambda: self.promised, catalogue.PROMISE
            yield lambda: self.budget, catalogue.BUDGET

    @property
    def config(self) -> RunConfig:
        """The resolved config."""
        return self.resolved.config

    @property
    def noise(self) -> float:
        """The config's noise multiplier."""
        return self.resolved.plan.noise.multiplier

    @cached_property
    def smaller(self) -> RunConfig:
        """The config with at most `MAX_CLIENTS` clients, at the same sampling rate."""
        config = self.config
        declared = cohort(config)
        assert declared.population is not None
        if declared.population <= MAX_CLIENTS:
            return config
        changes: dict[str, int] = {"partition.clients": MAX_CLIENTS}
        if isinstance(declared, FixedCohort):
            changes["cohort.size"] = max(1, round(declared.rate * MAX_CLIENTS))
        return config.replace(**changes)

    @cached_property
    def claimed(self) -> float:
        """Claimed epsilon of the whole run."""
        return self.resolved.plan.epsilon(self.config.noise.delta)

    def at_most(self, most: int) -> StrategyTarget:
        """A target with at most ``most`` rounds (one event's at least), at the whole run's cost."""
        smaller, sampler = self.smaller, cohort(self.smaller)
        grouped = sampler.law().rounds
        # With groups that take turns, a canary may not be sampled at all in fewer rounds.
        least = grouped if grouped < self.config.rounds else sampler.gaussians(1)
        rounds, z = min(self.config.rounds, max(most, least)), self.noise
        if rounds < self.config.rounds:
            smaller = smaller.replace(**_rounds_of(smaller, rounds))
            plan = factories.release_plan(smaller)
            z = plan.calibrated(self.claimed, self.config.noise.delta).noise.multiplier
        return StrategyTarget(strategies(smaller, z), rounds=rounds)

    @cached_property
    def full(self) -> StrategyTarget:
        """A target with as many rounds as whole runs can afford, at the config's noise."""
        rounds = min(self.config.rounds, MAX_WHOLE_ROUNDS)
        return StrategyTarget(strategies(self.smaller, self.noise), rounds=rounds)

    @property
    def promised(self) -> tuple[list[Event], int, float, float]:
        """Events of a run's first round, and the epsilon computed before the run."""
        brief = self.full.with_rounds(1).observe(self.full.silent_clients(), 1)
        events = [entry.event for entry in brief.entries]
        return events, self.config.rounds, self.claimed, self.config.noise.delta

    @property
    def same_seed_other_noise(self) -> tuple[Floats, str]:
        """Rounds of two runs with the same seed and different configs, each scaled to one size.

        If they shared noise, the difference of their releases would show sums without noise.
        """
        rows = []
        for z in (self.noise, 1.25 * self.noise):
            few = StrategyTarget(strategies(self.smaller, z), rounds=self.full.rounds)
            few = few.at_most(FEW_ROUNDS).with_model(parameters(MEDIUM_PARAMETERS))
            moves = few.whitened(few.observe(few.silent_clients(), self.seed).moves)
            rows.append(
                moves / np.maximum(np.sqrt(np.square(moves).mean(1, keepdims=True)), 1e-300)
            )
        examined = f"{len(rows[0])} rounds each of two runs of one seed, at two noise multipliers"
        return np.concatenate(rows), examined

    @property
    def budget(self) -> tuple[Mapping[str, int], str] | None:
        """Rounds released with a budget, without a stop and when resumed after the first round."""
        # If rounds are charged together, a budget allows all or none of them.
        if self.full.event.law.rounds > 1:
            return None
        budget = budget_between(self.full.event, self.config.noise.delta)
        if not budget:  # at a large delta a few rounds cost no epsilon
            return None
        limited = strategies(self.smaller, self.noise, budget)
        target = StrategyTarget(limited, rounds=AFFORDABLE_ROUNDS + 3)
        released = {
            name: target.observe(target.silent_clients(), self.seed, resume_after=stop).released
            for name, stop in (("one run", 0), ("a run that was resumed", 1))
        }
        return released, f"{target.rounds} rounds at a budget of epsilon {budget:.4g}"

    @property
    def assumptions(self) -> dict[str, str]:
        """The claim, its neighbours and the federation, in sentences."""
        noise, full = self.config.noise, self.full
        return {
            "claim": f"epsilon {self.claimed:.4g} at delta {noise.delta:g} after "
            f"{self.config.rounds:,} rounds of {self.config.mechanism.name} at noise multiplier "
            f"{self.noise:.4g}",
            "neighbours": _NEIGHBOURS[full.adjacency],
            "federation": f"{full.population:,} clients, {full.plan.sampler.name} cohort of "
            f"{full.plan.denominator:g} expected, noise by the {noise.placement}; a model of "
            "few parameters; the mean is added to it, since what a server's optimiser makes of "
            "it is post-processing",
        }

    def of_examples(self, worlds: int) -> Iterator[ExampleEvidence]:
        """Evidence on local training, of clients with the fewest and with the most examples."""
        for size in self._sizes:
            privacy = self.resolved.trainer.privacy
            assert privacy is not None
            work = self.config.client.make_work()
            target = TrainerTarget.smaller(privacy, work, size, MAX_EXAMPLES)
            yield ExampleEvidence.of(target, self.config.rounds, worlds, self.seed)

    @property
    def _sizes(self) -> list[int]:
        sizes = self.resolved.data.sizes if self.config.client.private else []
        return sorted({min(sizes), max(sizes)}) if sizes else []

    @property
    def examples(self) -> str:
        """Assumptions of the checks at example level, in a sentence."""
        return (
            f"clients with {' and '.join(f'{size:,}' for size in self._sizes)} examples (of more "
            f"than {MAX_EXAMPLES:,}, this many at the same rate), through the trainer; gradients "
            "of examples are made up, and one is zero or not; and examples of the config's own "
            "data through its own model"
        )


def _rounds_of(config: RunConfig, rounds: int) -> dict[str, int]:
    """Changes that give the config so many rounds, with clients' evaluations, if any, in them."""
    every = min(config.evaluate.clients_every, rounds)
    return {"rounds": rounds, "evaluate.clients-every": every}


def strategies(
    config: RunConfig, noise_multiplier: float, budget: float | None = None
) -> StrategyFactory:
    """Make strategies like those of the config's runs, for any seed."""
    tree = config.to_tree()
    # Synthetic clients need no privacy of their own.
    del tree["client"]["mechanism"], tree["client"]["noise"]
    # Server optimizers only post-process the mean, so it is simply added. Synthetic clients have
    # no devices, which would only drop replies.
    tree["server"] = {"optimizer": "sgd", "lr": 1.0}
    tree.pop("devices", None)
    # Clients do not evaluate either.
    evaluate = config.evaluate
    tree["evaluate"] = {"every": evaluate.every, "unprotected": evaluate.unprotected}
    changes: dict[str, float | str] = {
        "noise.multiplier": noise_multiplier,
        "noise.target-epsilon": "",
        "noise.max-epsilon": "" if budget is None else budget,
        "noise.entropy": "config",
    }
    return _for_any_seed(RunConfig.parse(tree).replace(**changes))


def evaluating(config: RunConfig) -> StrategyFactory:
    """Make strategies of the config's runs with its private evaluations, for any seed."""
    tree = config.to_tree()
    tree.pop("devices", None)  # they would only drop clients that are sampled
    changes = {"noise.entropy": "config", "noise.max-epsilon": ""}
    return _for_any_seed(RunConfig.parse(tree).replace(**changes))


def _for_any_seed(seeded: RunConfig) -> StrategyFactory:
    unseeded = seeded.replace(**{"noise.entropy": "system"})
    resolved = resolve(seeded)

    def strategy(seed: int | None) -> DPFedAvg:
        # Thousands of runs differ only in their seeds. Resolving each would take as long as a
        # round, and is not needed: seed and release digest key the noise.
        config = unseeded if seed is None else replace(seeded, seed=seed)
        return make_strategy(replace(resolved, config=config))

    return strategy


def own_addresses(config: RunConfig) -> tuple[list[Address], int]:
    """Addresses that a run's first rounds draw from, and their number; nothing is written."""
    # With random allocation in blocks, rounds must be a multiple of a block.
    participations = cohort(config).gaussians(1)
    rounds = min(participations * -(-OWN_ROUNDS // participations), config.rounds)
    changes: dict[str, str | int] = {
        **_rounds_of(config, rounds),
        "client.state-dir": "",
        "client.noise.max-epsilon": "",
        "engine.name": "local",
        "evaluate.every": 0,
        "noise.entropy": "config",
        "noise.max-epsilon": "",
    }
    changes |= {"client.steps": OWN_STEPS} if config.client.steps else {"client.epochs": 1}
    short = config.replace(**changes)
    with watched() as addresses:
        resolved = resolve(short)
        try:
            drive(resolved, LocalGrid(resolved.trainer))
        except FedsimError:
            raise
        except Exception as error:
            # What a failure reveals is judged by the runs with canaries, which observe it.
            _log.warning("the config's own run ended with %s: %s", type(error).__name__, error)
    return addresses, short.rounds


@contextmanager
def watched() -> Iterator[list[Address]]:
    """Record the addresses of random draws made in this context, without intended repeats."""
    addresses: list[Address] = []
    before = Randomness.address_observer
    Randomness.address_observer = addresses.append
    try:
        yield addresses
    finally:
        Randomness.address_observer = before


_NEIGHBOURS = {
    "add-remove": "with the canary, or without such a client",
    "zero-out": "the canary takes part, or is asked and contributes nothing",
    "replace-one": "the canary sends one update, or another in its place",
}
