"""The audit that belongs to a config: its mechanism, cohort, noise and number of rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fedsim.audit.checks import Check
from fedsim.audit.claim import Claim
from fedsim.audit.config_checks import address_check, input_check
from fedsim.audit.conformance import MOST_ROUNDS as MOST_WHOLE_ROUNDS
from fedsim.audit.conformance import unrelated_noise_check
from fedsim.audit.example_checks import example_checks
from fedsim.audit.example_runs import ExamplePlan
from fedsim.audit.ledger_checks import (
    AFFORDABLE,
    budget_between,
    budget_check,
    promise_check,
)
from fedsim.audit.observation import PARAMETERS, Target, observe, observe_resumed
from fedsim.audit.verdict import Verdict, audit, silenced_logs
from fedsim.audit.worlds import WORLDS
from fedsim.cohorts import FixedCohort
from fedsim.config import RunConfig
from fedsim.config.plan import cohort, local_work, with_added_noise
from fedsim.errors import FedsimError
from fedsim.privacy import Event, calibrate, epsilon
from fedsim.runs.factories import release_plan
from fedsim.runs.local_training import most_expensive_client
from fedsim.runs.preflight import check
from fedsim.runs.resolve import Resolved, resolve, strategy_of
from fedsim.strategies import DPFedAvg, sgd

# More clients, or more rounds of the one run, cost time and teach nothing.
MOST_CLIENTS = 1000
MOST_ROUNDS = 300
MOST_EXAMPLES = 512


@dataclass(frozen=True)
class ConfigAudit:
    """A config's claim, and the smaller federations on which it is attacked.

    Two-world runs have at most ``rounds`` rounds, with noise that makes these cost the same
    epsilon as the config's: a bug shows in two rounds as well as in two hundred.

    Parameters
    ----------
    config : RunConfig
    rounds : int
        Of a two-world run, at most.

    Raises
    ------
    FedsimError
        If the config claims no privacy, at either level.
    """

    config: RunConfig
    rounds: int = 2

    def __post_init__(self) -> None:
        config = self.config
        if config.client.private:
            return
        if config.mechanism.name == "none":
            raise FedsimError(
                "mechanism.name = 'none' claims no client-level privacy, so there is nothing to "
                "audit; choose one such as 'clipping'."
            )
        if not config.private:
            raise FedsimError(
                "noise.multiplier = 0.0 claims no privacy, so there is nothing to audit; it must "
                "be greater than 0."
            )
        if self.rounds < 1:
            raise FedsimError(f"rounds is {self.rounds}; it must be at least 1.")

    def run(
        self,
        *,
        runs: int = 300,
        canaries: int = 512,
        checks: bool = True,
        confidence: float = 0.99,
        seed: int = 1,
        deep: bool = False,
        tick: Callable[[int], None] = lambda runs: None,
    ) -> tuple[Verdict, dict[str, str]]:
        """Attack, and say on which assumptions; see `audit` for the parameters.

        Returns
        -------
        verdict : Verdict
        assumed : mapping of name to sentence

        Raises
        ------
        FedsimError
            If the config could not be run: as `fedsim run` says it, before any work.
        """
        resolved = resolve(self.config)
        check(resolved)
        with silenced_logs():
            examples, about = self._examples(resolved, runs, seed) if checks else ([], {})
            if checks:
                examples.append(address_check(self.config))
        if self.config.private:
            verdict, assumed = self._clients(
                examples,
                runs=runs,
                canaries=canaries,
                checks=checks,
                confidence=confidence,
                seed=seed,
                deep=deep,
                tick=tick,
            )
            return verdict, assumed | about
        claim = Claim(tuple(self._example_events(resolved)), self.config.client.noise.delta)
        return Verdict(claim, (), None, None, tuple(examples), confidence, 0, 0), about

    def _example_events(self, resolved: Resolved) -> list[Event]:
        """What the run costs whoever pays most at example level."""
        privacy, sizes = resolved.example_privacy, resolved.data.split.sizes
        worst = most_expensive_client(self.config, privacy, sizes, self.config.rounds)
        return [] if worst is None else [worst.event]

    def _examples(
        self, resolved: Resolved, runs: int, seed: int
    ) -> tuple[list[Check], dict[str, str]]:
        """Checks of local training, for clients with fewest and with most examples."""
        if not self.config.client.private:
            return [], {}
        privacy = resolved.example_privacy
        assert privacy is not None
        sizes = sorted(resolved.data.split.sizes)
        work = local_work(self.config)
        checks: list[Check] = []
        for size in sorted({sizes[0], sizes[-1]}):
            plan = ExamplePlan.smaller(privacy, work, size, MOST_EXAMPLES)
            checks += example_checks(plan, self.config.rounds, max(20, runs // 2), seed)
        made_up = (
            f"clients with {' and '.join(f'{size:,}' for size in sorted({sizes[0], sizes[-1]}))} "
            f"examples (of more than {MOST_EXAMPLES:,}, so many at the same rate), through the "
            "trainer; an example's gradient is made up, and is there or is zero; and examples of "
            "the config's own data through its own model"
        )
        checks.append(input_check(self.config))
        return checks, {"examples": made_up}

    def _clients(
        self,
        examples: list[Check],
        *,
        runs: int,
        canaries: int,
        checks: bool,
        confidence: float,
        seed: int,
        deep: bool,
        tick: Callable[[int], None],
    ) -> tuple[Verdict, dict[str, str]]:
        noise, config = release_plan(self.config).noise.multiplier, with_added_noise(self.config)
        declared = cohort(config)
        smaller = _smaller(config)
        delta = config.noise.delta
        claimed = epsilon(
            noise_multiplier=noise, cohort=declared, rounds=config.rounds, delta=delta
        )

        def shortened(most: int) -> tuple[Target, float]:
            rounds = min(config.rounds, most)
            z = noise
            if rounds < config.rounds:
                z = calibrate(
                    target_epsilon=claimed, cohort=cohort(smaller), rounds=rounds, delta=delta
                )
            return Target(_Factory.of(smaller, z), rounds), z

        (few, few_z), (many, many_z) = shortened(self.rounds), shortened(MOST_ROUNDS)
        full = Target(_Factory.of(smaller, noise), min(config.rounds, MOST_WHOLE_ROUNDS))
        louder = Target(_Factory.of(smaller, 1.25 * noise), full.rounds)
        with silenced_logs():
            extra = [
                *examples,
                _promise(full, config.rounds, claimed, delta),
                unrelated_noise_check(full, louder, seed),
                *([run_budget_check(smaller, noise, delta, seed)] if checks else []),
            ]
        verdict = audit(
            few.strategy,
            rounds=few.rounds,
            runs=runs,
            worlds=WORLDS if runs else (),
            canaries=canaries,
            one_run=many,
            full=full,
            checks=checks,
            extra=extra,
            confidence=confidence,
            seed=seed,
            deep=deep,
            tick=tick,
        )
        assumed = {
            "claim": f"epsilon {claimed:.4g} at delta {delta:g} after "
            f"{config.rounds:,} rounds of {config.mechanism.name} at noise multiplier {noise:.4g}",
            "neighbours": _NEIGHBOURS[declared.adjacency],
            "federation": f"{full.population:,} clients, {full.settings.cohort.name} cohort of "
            f"{full.denominator:g} expected, noise by the {config.noise.placement}; a model of "
            "few parameters; the mean is added to it as it is, since the rest is post-processing",
        }
        if checks:
            assumed["tests"] = (
                f"the first {_rounds(full.rounds)} of {config.rounds:,}, of clients that send "
                "zeros, that move a coordinate each, one or several at once, or that attack"
            )
        if runs:
            assumed["two worlds"] = (
                f"{runs:,} runs without and {runs:,} with the canary, {_rounds(few.rounds)} at "
                f"noise multiplier {few_z:.4g}: epsilon {verdict.claim.epsilon:.4g}; thresholds "
                "from one half, errors from the other"
            )
        if verdict.one_run is not None and verdict.one_run_claim is not None:
            assumed["one run"] = (
                f"{verdict.one_run.canaries} canaries, each in or out by a coin, "
                f"{_rounds(many.rounds)} at noise multiplier {many_z:.4g}: epsilon "
                f"{verdict.one_run_claim.epsilon:.4g}"
            )
        return verdict, assumed


def run_budget_check(config: RunConfig, noise: float, delta: float, seed: int) -> Check:
    """A run with a budget, and one that is stopped after its first round and resumed."""
    budget = budget_between(Target(_Factory.of(config, noise)).event, delta)
    target = Target(_Factory.of(config, noise, budget), AFFORDABLE + 3)
    clients = target.silent_clients(PARAMETERS)
    moves, _ = observe_resumed(target, clients, PARAMETERS, seed, 1)
    released = {
        "one run": observe(target, clients, PARAMETERS, seed).released,
        "a run that was resumed": int((moves != 0).any(1).sum()),
    }
    return budget_check(released, f"{target.rounds} rounds at a budget of epsilon {budget:.4g}")


def _promise(full: Target, rounds: int, claimed: float, delta: float) -> Check:
    """What the ledger of a run says, against what was said before it."""
    brief = observe(full.with_rounds(1), full.silent_clients(PARAMETERS), PARAMETERS, 1)
    return promise_check([entry.event for entry in brief.entries], rounds, claimed, delta)


@dataclass(frozen=True)
class _Factory:
    """Strategies as the config's runs have them, but for seed and server optimiser."""

    seeded: RunConfig
    unseeded: RunConfig
    resolved: Resolved

    @classmethod
    def of(
        cls, config: RunConfig, noise_multiplier: float, budget: float | None = None
    ) -> _Factory:
        tree = config.to_tree()
        # Clients are made up, and need no privacy of their own.
        del tree["client"]["mechanism"], tree["client"]["noise"]
        changes: dict[str, float | str] = {
            "noise.multiplier": noise_multiplier,
            "noise.target-epsilon": "",
            "noise.max-epsilon": "" if budget is None else budget,
            "noise.entropy": "config",
            "client.state": "reset",
            "evaluate.clients-every": 0,
        }
        changed = RunConfig.parse(tree).replace(**changes)
        unseeded = changed.replace(**{"noise.entropy": "system"})
        return cls(changed, unseeded, resolve(changed))

    def __call__(self, seed: int | None) -> DPFedAvg:
        config = self.unseeded if seed is None else replace(self.seeded, seed=seed)
        # Thousands of runs differ in their seeds alone, which key their noise beside the digest:
        # resolving each again would take as long as a round.
        strategy = strategy_of(replace(self.resolved, config=config))
        # What a server's optimiser makes of the mean is post-processing: it is added.
        strategy.server_optimizer = sgd()
        # Made-up clients have no devices: who is away shows no canary.
        strategy.replying = None
        return strategy


_NEIGHBOURS = {
    "add-remove": "the canary is there, or there is no such client",
    "zero-out": "the canary takes part, or is asked and contributes nothing",
    "replace-one": "the canary sends one update, or another in its place",
}


def _smaller(config: RunConfig) -> RunConfig:
    """The same federation with at most `MOST_CLIENTS` clients, at the same rate."""
    declared = cohort(config)
    assert declared.population is not None
    if declared.population <= MOST_CLIENTS:
        return config
    changes: dict[str, int] = {"partition.clients": MOST_CLIENTS}
    if isinstance(declared, FixedCohort):
        changes["cohort.size"] = max(1, round(declared.rate * MOST_CLIENTS))
    return config.replace(**changes)


def _rounds(rounds: int) -> str:
    return f"{rounds:,} round" + "s" * (rounds != 1)
