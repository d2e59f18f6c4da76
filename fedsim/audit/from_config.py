"""The audit that belongs to a config: its mechanism, cohort, noise and number of rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedsim.audit.runs import Plan
from fedsim.audit.verdict import Verdict, audit
from fedsim.cohorts import Cohort, FixedCohort, FullCohort, PoissonCohort
from fedsim.config import RunConfig
from fedsim.errors import FedsimError
from fedsim.privacy import calibrate, epsilon
from fedsim.runs.build import Build
from fedsim.runs.objects import cohort, mechanism
from fedsim.strategies import DPFedAvg, sgd

__all__ = ["ConfigAudit"]

# More clients, or more rounds of the one run, cost time and teach nothing.
MOST_CLIENTS = 1000
MOST_ROUNDS = 300


@dataclass(frozen=True)
class ConfigAudit:
    """A config's claim, and the smaller federations on which it is attacked.

    Two-world runs have at most ``rounds`` rounds, with noise that makes these cost the same
    epsilon as the config's: a bug shows in three rounds as well as in three hundred.

    Parameters
    ----------
    config : RunConfig
    rounds : int
        Of a two-world run, at most.

    Raises
    ------
    FedsimError
        If the config claims no client-level privacy.
    """

    config: RunConfig
    rounds: int = 3

    def __post_init__(self) -> None:
        config = self.config
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
        runs: int = 1000,
        canaries: int = 512,
        confidence: float = 0.99,
        seed: int = 1,
        tick: Callable[[int], None] = lambda runs: None,
    ) -> tuple[Verdict, dict[str, str]]:
        """Attack, and say on which assumptions; see `audit` for the parameters.

        Returns
        -------
        verdict : Verdict
        assumed : mapping of name to sentence
        """
        noise, config = Build(self.config).noise_multiplier, self.config
        declared = cohort(config)
        small = _smaller(declared)
        claimed = epsilon(
            noise_multiplier=noise,
            cohort=declared,
            rounds=config.rounds,
            delta=config.noise.delta,
        )

        def plan(most: int) -> tuple[Plan, float]:
            rounds = min(config.rounds, most)
            z = noise
            if rounds < config.rounds:
                z = calibrate(
                    target_epsilon=claimed, cohort=small, rounds=rounds, delta=config.noise.delta
                )
            return Plan(_Factory(config, small, z), rounds), z

        (few, few_z), (many, many_z) = plan(self.rounds), plan(MOST_ROUNDS)
        verdict = audit(
            few.strategy,
            rounds=few.rounds,
            runs=runs,
            canaries=canaries,
            one_run=many,
            confidence=confidence,
            seed=seed,
            tick=tick,
        )
        assumed = {
            "claim": f"epsilon {claimed:.4g} at delta {config.noise.delta:g} after "
            f"{config.rounds:,} rounds of {config.mechanism.name} at noise multiplier {noise:.4g}",
            "neighbours": _NEIGHBOURS[declared.adjacency],
            "two worlds": f"{runs:,} runs without and {runs:,} with the canary, "
            f"{_rounds(few.rounds)} at noise multiplier {few_z:.4g}: epsilon "
            f"{verdict.claim.epsilon:.4g}; thresholds from one half, errors from the other",
            "federation": f"{small.population:,} clients, {small.name} cohort of "
            f"{small.expected_size:g} expected, noise by the {config.noise.placement}; a model of "
            "8 parameters; the mean is added to it as it is, since the rest is post-processing",
        }
        if verdict.one_run is not None and verdict.one_run_claim is not None:
            assumed["one run"] = (
                f"{verdict.one_run.canaries} canaries, each in or out by a coin, "
                f"{_rounds(many.rounds)} at noise multiplier {many_z:.4g}: epsilon "
                f"{verdict.one_run_claim.epsilon:.4g}"
            )
        return verdict, assumed


@dataclass(frozen=True)
class _Factory:
    config: RunConfig
    cohort: Cohort
    noise_multiplier: float

    def __call__(self, seed: int) -> DPFedAvg:
        noise = self.config.noise
        return DPFedAvg(
            mechanism=mechanism(self.config.mechanism),
            cohort=self.cohort,
            noise_multiplier=self.noise_multiplier,
            delta=noise.delta,
            seed=seed,
            # What a server's optimiser makes of the mean is post-processing: it is added.
            server_optimizer=sgd(),
            placement=noise.placement,
            hardened_noise=noise.hardened,
        )


_NEIGHBOURS = {
    "add-remove": "the canary is there, or there is no such client",
    "zero-out": "the canary takes part, or is asked and contributes nothing",
    "replace-one": "the canary sends one update, or another in its place",
}


def _smaller(declared: Cohort) -> Cohort:
    """The same cohort of at most `MOST_CLIENTS` clients, at the same rate."""
    population = declared.population
    assert population is not None
    if population <= MOST_CLIENTS:
        return declared
    if isinstance(declared, PoissonCohort):
        return PoissonCohort(rate=declared.rate, population=MOST_CLIENTS)
    if isinstance(declared, FixedCohort):
        size = max(1, round(declared.rate * MOST_CLIENTS))
        return FixedCohort(size=size, population=MOST_CLIENTS)
    return FullCohort(population=MOST_CLIENTS)


def _rounds(rounds: int) -> str:
    return f"{rounds:,} round" + "s" * (rounds != 1)
