"""Audit of a config: its mechanism, cohort, noise, number of rounds, and local training.

The claim is attacked on smaller federations of synthetic clients. Two-world runs have few rounds,
with less noise so that they cost the same epsilon as the config's run: a bug shows in two rounds as
well as in two hundred. Two checks use the config's own data and model: a few rounds of the run, in
which every address of random draws is recorded; and gradients of its own examples, good and bad,
through its model, loss and path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedsim.audit import catalogue
from fedsim.audit.bound_checks import own_examples
from fedsim.audit.checks import Finding, Floats, Gathered, checks_of, findings
from fedsim.audit.claim import AFFORDABLE, Claim, budget_between
from fedsim.audit.clients import WORLDS
from fedsim.audit.evidence import FEW, SMALL
from fedsim.audit.evidence import MOST_ROUNDS as MOST_WHOLE_ROUNDS
from fedsim.audit.local_training import ExampleEvidence, TrainerTarget
from fedsim.audit.metrics_release import MetricsEvidence
from fedsim.audit.plan_checks import own_addresses
from fedsim.audit.target import StrategyFactory, StrategyTarget, parameters
from fedsim.audit.verdict import Verdict, audit, silenced_logs
from fedsim.cohorts import FixedCohort
from fedsim.config import RunConfig
from fedsim.config.plan import cohort, local_work, with_added_noise
from fedsim.errors import FedsimError
from fedsim.privacy import Event
from fedsim.runs import factories
from fedsim.runs.preflight import check
from fedsim.runs.resolve import Resolved, resolve, strategy_of
from fedsim.strategies import DPFedAvg

# Limits: more clients, or more rounds of the one run, cost time and detect little more.
MOST_CLIENTS = 1000
MOST_ROUNDS = 300
MOST_EXAMPLES = 512


def audit_config(
    config: RunConfig,
    *,
    rounds: int = 2,
    runs: int = 300,
    canaries: int = 512,
    checks: bool = True,
    confidence: float = 0.99,
    seed: int = 1,
    deep: bool = False,
    tick: Callable[[int], None] = lambda runs: None,
) -> tuple[Verdict, dict[str, str]]:
    """Audit the claim of a config, and state the audit's assumptions.

    Parameters
    ----------
    config : RunConfig
    rounds : int
        Largest number of rounds of a two-world run.
    runs, canaries, checks, confidence, seed, deep, tick
        As for `fedsim.audit.audit`; with 0 runs there are no worlds.

    Returns
    -------
    verdict : Verdict
    assumptions : mapping of name to sentence

    Raises
    ------
    FedsimError
        If the config claims no privacy at either level, or could not be run (with the message of
        `fedsim run`); before any work.
    """
    _refuse_without_claim(config, rounds)
    resolved = resolve(config)
    check(resolved)
    evidence = ConfigEvidence(resolved, seed)
    results: list[Finding] = []
    assumptions: dict[str, str] = {}
    if checks:
        with silenced_logs():
            for clients in evidence.of_examples(max(20, runs // 2)):
                of_examples = findings(clients.checks())
                results += [replace(one, name=f"{one.name}, examples") for one in of_examples]
            results += findings(evidence.checks())
            if config.evaluate.private:
                metrics = MetricsEvidence(evaluating(resolved), seed)
                of_metrics = findings(metrics.checks())
                results += [replace(one, name=f"{one.name}, metrics") for one in of_metrics]
        if config.client.private:
            assumptions["examples"] = evidence.examples
    if not config.private:
        privacy, sizes = resolved.local.privacy, resolved.data.sizes
        worst = factories.most_expensive_client(config, privacy, sizes, config.rounds)
        claim = Claim(() if worst is None else (worst,), config.client.noise.delta)
        return Verdict(claim, (), tuple(results), confidence), assumptions
    few, many, full = evidence.at_most(rounds), evidence.at_most(MOST_ROUNDS), evidence.full
    verdict = audit(
        few.strategy,
        rounds=few.rounds,
        runs=runs,
        worlds=WORLDS if runs else (),
        canaries=canaries,
        one_run=many,
        full=full,
        checks=checks,
        extra=results,
        confidence=confidence,
        seed=seed,
        deep=deep,
        tick=tick,
    )
    assumptions = evidence.assumptions | assumptions
    if checks:
        assumptions["tests"] = (
            f"the first {_rounds(full)} of {config.rounds:,}, with clients that send zeros, that "
            "move a coordinate each, one or several at once, or that attack"
        )
    if runs:
        assumptions["two worlds"] = (
            f"{runs:,} runs without and {runs:,} with the canary, {_rounds(few)} at noise "
            f"multiplier {few.plan.noise.multiplier:.4g}: epsilon {verdict.claim.epsilon:.4g}; "
            "thresholds from one half, errors from the other"
        )
    if verdict.one_run is not None:
        assumptions["one run"] = (
            f"{verdict.one_run.finding.looked_at}, {_rounds(many)} at "
            f"noise multiplier {many.plan.noise.multiplier:.4g}: epsilon "
            f"{verdict.one_run.claim.epsilon:.4g}"
        )
    return verdict, assumptions


def _refuse_without_claim(config: RunConfig, rounds: int) -> None:
    if rounds < 1:
        raise FedsimError(f"rounds is {rounds}; it must be at least 1.")
    if config.client.private or config.private:
        return
    if config.mechanism.name == "none":
        raise FedsimError(
            "mechanism.name = 'none' claims no client-level privacy, so there is nothing to "
            "audit; choose one such as 'clipping'."
        )
    raise FedsimError(
        "noise.multiplier = 0.0 claims no privacy, so there is nothing to audit; it must "
        "be greater than 0."
    )


@dataclass(frozen=True, eq=False)
class ConfigEvidence:
    """A config's claim, samples for checks without attacks, and smaller federations."""

    resolved: Resolved
    seed: int

    def checks(self) -> Iterator[Gathered]:
        """Samples and checks without attacks, at both levels."""
        yield lambda: own_addresses(self.config), catalogue.ADDRESSES
        if self.resolved.local.privacy is not None:
            yield lambda: self.resolved, _OWN_EXAMPLES
        if self.config.private:
            yield lambda: self.rival, catalogue.ANOTHER_RUN
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
        """The config with at most `MOST_CLIENTS` clients, at the same sampling rate."""
        config = with_added_noise(self.config)
        declared = cohort(config)
        assert declared.population is not None
        if declared.population <= MOST_CLIENTS:
            return config
        changes: dict[str, int] = {"partition.clients": MOST_CLIENTS}
        if isinstance(declared, FixedCohort):
            changes["cohort.size"] = max(1, round(declared.rate * MOST_CLIENTS))
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
            smaller = smaller.replace(rounds=rounds)
            plan = factories.release_plan(smaller)
            z = plan.calibrated(self.claimed, self.config.noise.delta).noise.multiplier
        return StrategyTarget(strategies(smaller, z), rounds=rounds)

    @cached_property
    def full(self) -> StrategyTarget:
        """A target with as many rounds as whole runs can afford, at the config's noise."""
        rounds = min(self.config.rounds, MOST_WHOLE_ROUNDS)
        return StrategyTarget(strategies(self.smaller, self.noise), rounds=rounds)

    @property
    def promised(self) -> tuple[list[Event], int, float, float]:
        """Events of a run's first round, and the epsilon computed before the run."""
        brief = self.full.with_rounds(1).observe(self.full.silent_clients(), 1)
        events = [entry.event for entry in brief.entries]
        return events, self.config.rounds, self.claimed, self.config.noise.delta

    @property
    def rival(self) -> tuple[Floats, str]:
        """Rounds of two runs with the same seed and different configs, each scaled to one size.

        If they shared noise, the difference of their releases would show sums without noise.
        """
        rows = []
        for z in (self.noise, 1.25 * self.noise):
            few = StrategyTarget(strategies(self.smaller, z), rounds=self.full.rounds).at_most(FEW)
            few = few.with_model(parameters(SMALL))
            moves = few.whitened(few.observe(few.silent_clients(), self.seed).moves)
            rows.append(
                moves / np.maximum(np.sqrt(np.square(moves).mean(1, keepdims=True)), 1e-300)
            )
        looked = f"{len(rows[0])} rounds each of two runs of one seed, at two noise multipliers"
        return np.concatenate(rows), looked

    @property
    def budget(self) -> tuple[Mapping[str, int], str] | None:
        """Rounds released with a budget, without a stop and when resumed after the first round."""
        # If rounds are charged together, a budget allows all or none of them.
        if self.full.event.law.rounds > 1:
            return None
        budget = budget_between(self.full.event, self.config.noise.delta)
        target = StrategyTarget(strategies(self.smaller, self.noise, budget), rounds=AFFORDABLE + 3)
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
            privacy = self.resolved.local.privacy
            assert privacy is not None
            work = local_work(self.config)
            target = TrainerTarget.smaller(privacy, work, size, MOST_EXAMPLES)
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
            f"than {MOST_EXAMPLES:,}, this many at the same rate), through the trainer; gradients "
            "of examples are made up, and one is zero or not; and examples of the config's own "
            "data through its own model"
        )


_OWN_EXAMPLES = checks_of("bound",
    ("what one example moves in the model itself", own_examples, "gradients are not per example"),
)  # fmt: skip

_NEIGHBOURS = {
    "add-remove": "with the canary, or without such a client",
    "zero-out": "the canary takes part, or is asked and contributes nothing",
    "replace-one": "the canary sends one update, or another in its place",
}


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
        "client.state": "reset" if config.client.state == "server" else config.client.state,
    }
    seeded = RunConfig.parse(tree).replace(**changes)
    unseeded = seeded.replace(**{"noise.entropy": "system"})
    resolved = resolve(seeded)

    def strategy(seed: int | None) -> DPFedAvg:
        # Thousands of runs differ only in their seeds. Resolving each would take as long as a
        # round, and is not needed: seed and release digest key the noise.
        config = unseeded if seed is None else replace(seeded, seed=seed)
        return strategy_of(replace(resolved, config=config))

    return strategy


def evaluating(resolved: Resolved) -> StrategyFactory:
    """Make strategies of the config's runs with its private evaluations, for any seed."""

    def strategy(seed: int | None) -> DPFedAvg:
        assert seed is not None
        changes = {"noise.entropy": "config", "noise.max-epsilon": ""}
        config = resolved.config.replace(**changes)
        return strategy_of(replace(resolved, config=replace(config, seed=seed)))

    return strategy


def _rounds(target: StrategyTarget) -> str:
    return f"{target.rounds:,} round" + "s" * (target.rounds != 1)
