"""The audit of a config: its mechanism, cohort, noise, number of rounds, and its local training.

The claim is attacked on smaller federations of made-up clients. Two-world runs have few rounds,
with noise that makes these cost the same epsilon as the config's: a bug shows in two rounds as well
as in two hundred.
"""

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
from fedsim.audit.observation import Target, observe
from fedsim.audit.verdict import Verdict, audit, silenced_logs
from fedsim.audit.worlds import WORLDS
from fedsim.cohorts import FixedCohort
from fedsim.config import RunConfig
from fedsim.config.plan import cohort, local_work, with_added_noise
from fedsim.errors import FedsimError
from fedsim.privacy import calibrate, epsilon
from fedsim.runs.factories import most_expensive_client
from fedsim.runs.preflight import check
from fedsim.runs.resolve import Resolved, resolve, strategy_of
from fedsim.strategies import DPFedAvg

# More clients, or more rounds of the one run, cost time and detect little more.
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
    """Attack what a config claims, and say on which assumptions.

    Parameters
    ----------
    config : RunConfig
    rounds : int
        Of a two-world run, at most.
    runs, canaries, checks, confidence, seed, deep, tick
        As of `fedsim.audit.audit`; with 0 runs there are no worlds.

    Returns
    -------
    verdict : Verdict
    assumed : mapping of name to sentence

    Raises
    ------
    FedsimError
        If the config claims no privacy, at either level, or could not be run: in the words of
        `fedsim run`, before any work.
    """
    _refuse_without_claim(config, rounds)
    resolved = resolve(config)
    check(resolved)
    found: list[Check] = []
    assumed: dict[str, str] = {}
    with silenced_logs():
        if checks and config.client.private:
            found += _example_level(resolved, runs, seed, assumed)
        if checks:
            found.append(address_check(config))
    if not config.private:
        privacy, sizes = resolved.example_privacy, resolved.data.split.sizes
        worst = most_expensive_client(config, privacy, sizes, config.rounds)
        claim = Claim(() if worst is None else (worst,), config.client.noise.delta)
        return Verdict(claim, (), tuple(found), confidence), assumed
    level = _ClientLevel(config, resolved.plan.noise.multiplier)
    few, many = (level.at_most(most) for most in (rounds, MOST_ROUNDS))
    full = Target(level.factory(level.noise), min(config.rounds, MOST_WHOLE_ROUNDS))
    with silenced_logs():
        louder = Target(level.factory(1.25 * level.noise), full.rounds)
        found += [level.promise_check(full), unrelated_noise_check(full, louder, seed)]
        if checks:
            found.append(run_budget_check(level.smaller, level.noise, config.noise.delta, seed))
    verdict = audit(
        few.strategy,
        rounds=few.rounds,
        runs=runs,
        worlds=WORLDS if runs else (),
        canaries=canaries,
        one_run=many,
        full=full,
        checks=checks,
        extra=found,
        confidence=confidence,
        seed=seed,
        deep=deep,
        tick=tick,
    )
    assumed = level.assumed(full) | assumed
    if checks:
        assumed["tests"] = (
            f"the first {_rounds(full)} of {config.rounds:,}, with clients that send zeros, that "
            "move a coordinate each, one or several at once, or that attack"
        )
    if runs:
        assumed["two worlds"] = (
            f"{runs:,} runs without and {runs:,} with the canary, {_rounds(few)} at noise "
            f"multiplier {_noise_of(few):.4g}: epsilon {verdict.claim.epsilon:.4g}; thresholds "
            "from one half, errors from the other"
        )
    if verdict.one_run is not None:
        assumed["one run"] = (
            f"{verdict.one_run.canaries} canaries, each in or out by a coin, {_rounds(many)} at "
            f"noise multiplier {_noise_of(many):.4g}: epsilon "
            f"{verdict.one_run.claim.epsilon:.4g}"
        )
    return verdict, assumed


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


def _example_level(
    resolved: Resolved, runs: int, seed: int, assumed: dict[str, str]
) -> list[Check]:
    """Checks of local training, for clients with the fewest and with the most examples."""
    privacy, config = resolved.example_privacy, resolved.config
    assert privacy is not None
    sizes = sorted(resolved.data.split.sizes)
    checks: list[Check] = []
    for size in sorted({sizes[0], sizes[-1]}):
        plan = ExamplePlan.smaller(privacy, local_work(config), size, MOST_EXAMPLES)
        checks += example_checks(plan, config.rounds, max(20, runs // 2), seed)
    checks.append(input_check(resolved))
    assumed["examples"] = (
        f"clients with {' and '.join(f'{size:,}' for size in sorted({sizes[0], sizes[-1]}))} "
        f"examples (of more than {MOST_EXAMPLES:,}, so many at the same rate), through the "
        "trainer; gradients of examples are made up, and one is zero or not; and examples of "
        "the config's own data through its own model"
    )
    return checks


@dataclass(frozen=True)
class _ClientLevel:
    """What a config claims of its clients, and strategies of smaller federations.

    Attributes
    ----------
    config : RunConfig
    noise : float
        Its noise multiplier.
    """

    config: RunConfig
    noise: float

    @property
    def smaller(self) -> RunConfig:
        """The same federation with at most `MOST_CLIENTS` clients, at the same rate."""
        config = with_added_noise(self.config)
        declared = cohort(config)
        assert declared.population is not None
        if declared.population <= MOST_CLIENTS:
            return config
        changes: dict[str, int] = {"partition.clients": MOST_CLIENTS}
        if isinstance(declared, FixedCohort):
            changes["cohort.size"] = max(1, round(declared.rate * MOST_CLIENTS))
        return config.replace(**changes)

    @property
    def claimed(self) -> float:
        """Epsilon of the whole run."""
        return epsilon(
            noise_multiplier=self.noise,
            cohort=cohort(with_added_noise(self.config)),
            rounds=self.config.rounds,
            delta=self.config.noise.delta,
        )

    def factory(self, noise_multiplier: float) -> _Factory:
        """The strategies at this noise multiplier."""
        return _Factory.of(self.smaller, noise_multiplier)

    def at_most(self, most: int) -> Target:
        """So many rounds, that cost what all of the config's do."""
        rounds, z = min(self.config.rounds, most), self.noise
        if rounds < self.config.rounds:
            z = calibrate(
                target_epsilon=self.claimed,
                cohort=cohort(self.smaller),
                rounds=rounds,
                delta=self.config.noise.delta,
            )
        return Target(self.factory(z), rounds)

    def promise_check(self, full: Target) -> Check:
        """The epsilon of a run's ledger, against the one computed before it."""
        brief = observe(full.with_rounds(1), full.silent_clients(), 1)
        events = [entry.event for entry in brief.entries]
        return promise_check(events, self.config.rounds, self.claimed, self.config.noise.delta)

    def assumed(self, full: Target) -> dict[str, str]:
        """The claim, its neighbours and the federation, in sentences."""
        noise = self.config.noise
        return {
            "claim": f"epsilon {self.claimed:.4g} at delta {noise.delta:g} after "
            f"{self.config.rounds:,} rounds of {self.config.mechanism.name} at noise multiplier "
            f"{self.noise:.4g}",
            "neighbours": _NEIGHBOURS[full.adjacency],
            "federation": f"{full.population:,} clients, {full.settings.cohort.name} cohort of "
            f"{full.denominator:g} expected, noise by the {noise.placement}; a model of "
            "few parameters; the mean is added to it, since what a server's optimiser makes of "
            "it is post-processing",
        }


_NEIGHBOURS = {
    "add-remove": "with the canary, or without such a client",
    "zero-out": "the canary takes part, or is asked and contributes nothing",
    "replace-one": "the canary sends one update, or another in its place",
}


def run_budget_check(config: RunConfig, noise: float, delta: float, seed: int) -> Check:
    """A run with a budget, and one that is stopped after its first round and resumed."""
    budget = budget_between(Target(_Factory.of(config, noise)).event, delta)
    target = Target(_Factory.of(config, noise, budget), AFFORDABLE + 3)
    released = {}
    for name, stop in (("one run", 0), ("a run that was resumed", 1)):
        seen = observe(target, target.silent_clients(), seed, resume_after=stop)
        released[name] = seen.released
    return budget_check(released, f"{target.rounds} rounds at a budget of epsilon {budget:.4g}")


@dataclass(frozen=True)
class _Factory:
    """Strategies as the config's runs have them, but for the seed."""

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
        # What a server's optimiser makes of the mean is post-processing: it is added. Made-up
        # clients have no devices: which of them reply says nothing of a canary.
        tree["server"] = {"optimizer": "sgd", "lr": 1.0}
        tree.pop("devices", None)
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
        return strategy_of(replace(self.resolved, config=config))


def _noise_of(target: Target) -> float:
    return target.settings.plan.noise.multiplier


def _rounds(target: Target) -> str:
    return f"{target.rounds:,} round" + "s" * (target.rounds != 1)
