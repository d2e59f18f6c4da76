"""Audit of a config: checks of what its user wrote, and attacks on its releases.

The releases are those of the config's own strategy (`DPFedAvg` with its mechanism, sampler and
noise) on a smaller federation of synthetic clients: one target among others. Its runs have few
rounds, with less noise so that they cost the same epsilon as the config's run: a bug shows in two
rounds as well as in two hundred.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from fedsim.array_types import Floats
from fedsim.audit import user_checks
from fedsim.audit.adapters.flower import strategy_target
from fedsim.audit.claim import Claim
from fedsim.audit.federation import SHAPES
from fedsim.audit.findings import findings
from fedsim.audit.target_audit import audit_target
from fedsim.audit.verdict import Verdict, check_numbers, silenced_logs
from fedsim.config import RunConfig
from fedsim.errors import FedsimError
from fedsim.mechanisms import Mechanism
from fedsim.privacy import Adjacency, Event
from fedsim.privacy.laws import declared_population
from fedsim.privacy.laws.buffered import Buffered
from fedsim.privacy.noise import Correlated
from fedsim.privacy.plan import ReleasePlan, is_user_code
from fedsim.rows import Layout
from fedsim.runs import factories
from fedsim.runs.preflight import check
from fedsim.runs.resolve import Resolved, resolve

MAX_CLIENTS = 20
"""Clients of an attacked federation: more cost time and hide the canary."""


@dataclass(frozen=True)
class PlanClaim:
    """The claim of a release plan (`ReleaseClaim`)."""

    plan: ReleasePlan[Mechanism]
    delta: float

    epsilon = None
    adaptive = False
    row: Literal["client"] = "client"

    @property
    def population(self) -> int:
        """Declared number of clients."""
        return declared_population(self.plan.sampler)

    @property
    def rounds(self) -> int:
        """Rounds of a run."""
        assert self.plan.rounds is not None
        return self.plan.rounds

    @property
    def rate(self) -> float:
        """Expected share of clients in a round."""
        return self.plan.sampler.expected_size / self.population

    @cached_property
    def clip_norm(self) -> float:
        """The mechanism's sensitivity in the first round."""
        mechanism = self.plan.mechanism
        return mechanism.sensitivity(mechanism.init(_LAYOUT), _LAYOUT)

    @property
    def noise_multiplier(self) -> float:
        """Of fresh draws, if noise is correlated."""
        return self.plan.noise.multiplier

    @property
    def adjacency(self) -> Adjacency:
        """The sampler's."""
        return self.plan.sampler.adjacency

    @property
    def white_noise(self) -> bool:
        """False: the noise's law is tested over longer runs (`user_checks.noise_of`)."""
        return False

    @property
    def shift(self) -> float | None:
        """Of one mechanism of constant sensitivity and independent noise; None for others."""
        mechanism, inclusion = self.plan.mechanism, self.round_event.law.inclusion(self.population)
        one_size = (
            len(mechanism.segments(_LAYOUT)) == 1
            and not mechanism.side_scalars
            and not mechanism.init(_LAYOUT)
        )
        if not one_size or inclusion is None or self.plan.noise.correlated:
            return None
        if self.round_event.law.rounds > 1:
            return None
        sensitivity = 2.0 if self.adjacency == "replace-one" else 1.0
        return inclusion.single * sensitivity / self.noise_multiplier

    @property
    def round_event(self) -> Event:
        """Event of a round, or of as many as its law covers."""
        return self.plan.event()

    @cached_property
    def claim(self) -> Claim:
        """The claim of the events that the ledger charges."""
        events = [self.plan.charge(t) for t in range(1, self.rounds + 1)]
        return Claim(tuple(event for event in events if event.count), self.delta)

    def independent_rounds(self, moves: Floats) -> Floats:
        """Multiply correlated noise by the matrix C, which makes it independent over rounds."""
        noise = self.plan.noise
        if not isinstance(noise, Correlated):
            return moves
        return np.asarray(np.einsum("st,...td->...sd", noise.matrix(moves.shape[-2]), moves))


_LAYOUT = Layout.of(
    {
        f"array-{index}": torch.zeros(shape, dtype=torch.float64)
        for index, shape in enumerate(SHAPES)
    }
)


def audit_config(
    config: RunConfig,
    *,
    rounds: int = 2,
    seconds: float = 25.0,
    runs: int = 0,
    confidence: float = 0.99,
    seed: int = 1,
) -> tuple[Verdict, dict[str, str]]:
    """Audit the claim of a config, and state the audit's assumptions.

    Parameters
    ----------
    config : RunConfig
    rounds : int
        Largest number of rounds of an attacked run.
    seconds, runs, confidence, seed
        As for `fedsim.audit.audit_target`.

    Returns
    -------
    verdict : Verdict
    assumptions : mapping of name to sentence

    Raises
    ------
    FedsimError
        If an argument is not allowed, or the config claims no privacy at either level, or could not
        be run (with the message of `fedsim run`); before any work.
    """
    check_numbers(confidence, runs or None)
    refuse_without_claim(config, rounds)
    resolved = resolve(config)
    resolved.plan.check_entropy("system")  # an audit tests a guarantee, whatever the seed
    check(resolved)
    with silenced_logs():
        results = findings(user_checks.checks(resolved, seed))
        if not config.private:
            return Verdict(_example_claim(resolved), (), tuple(results), confidence), {}
        claim = PlanClaim(
            attacked_plan(resolved.plan, rounds, config.noise.delta), config.noise.delta
        )
        target = strategy_target(lambda f: user_checks.make_strategy(claim.plan, f.seed))
        verdict = audit_target(
            target,
            claim,
            seconds=seconds,
            runs=runs,
            confidence=confidence,
            seed=seed,
            others=results,
        )
    return verdict, _assumptions(resolved, claim)


def attacked_plan(plan: ReleasePlan[Any], most: int, delta: float) -> ReleasePlan[Any]:
    """A plan with at most ``most`` rounds and few clients, at the whole plan's epsilon.

    A sampler whose population cannot be changed keeps it; rounds are at least those that one event
    covers.
    """
    assert plan.rounds is not None
    covered = plan.sampler.law().rounds
    least = covered if covered < plan.rounds else plan.sampler.gaussians(1)
    rounds, epsilon = min(plan.rounds, max(most, least)), plan.epsilon(delta)
    smaller = replace(plan, sampler=_smaller_sampler(plan.sampler, rounds), rounds=rounds)
    return smaller.calibrated(epsilon, delta)


def _smaller_sampler(sampler: Any, rounds: int) -> Any:
    """The sampler with `MAX_CLIENTS` clients at the same rate, if its fields say how."""
    if isinstance(sampler, Buffered):
        # All at a time, so that the canary is in a release of a short run; half of them in each.
        clients = min(MAX_CLIENTS, declared_population(sampler))
        buffer = min(sampler.buffer, max(1, clients // 2))
        return replace(
            sampler, concurrency=clients, buffer=buffer, rounds=rounds, population=clients
        )
    names = {field.name for field in fields(sampler)} if is_dataclass(sampler) else set()
    few = declared_population(sampler) <= MAX_CLIENTS
    if few or is_user_code(sampler) or "population" not in names:
        return sampler
    size = {"size": max(1, round(sampler.rate * MAX_CLIENTS))} if "size" in names else {}
    return replace(sampler, population=MAX_CLIENTS, **size)


def _example_claim(resolved: Resolved) -> Claim:
    config, privacy = resolved.config, resolved.trainer.privacy
    worst = factories.most_expensive_client(config, privacy, resolved.data.sizes, config.rounds)
    return Claim(() if worst is None else (worst,), config.client.noise.delta)


def _assumptions(resolved: Resolved, claim: PlanClaim) -> dict[str, str]:
    config, plan = resolved.config, resolved.plan
    epsilon = plan.epsilon(config.noise.delta)
    return {
        "claim": f"epsilon {epsilon:.4g} at delta {config.noise.delta:g} after "
        f"{config.rounds:,} rounds of {config.mechanism.name} at noise multiplier "
        f"{plan.noise.multiplier:.4g}",
        "neighbours": _NEIGHBOURS[claim.adjacency],
        "federation": f"{claim.population:,} clients with made-up updates, {plan.sampler.name} "
        f"cohorts; {claim.rounds} rounds at noise multiplier {claim.noise_multiplier:.4g}, which "
        "cost as much; the released mean is added to a model of few parameters",
    }


def refuse_without_claim(config: RunConfig, rounds: int) -> None:
    """Raise a `FedsimError` if the config claims no privacy, or there are no rounds to audit."""
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


_NEIGHBOURS = {
    "add-remove": "with the canary, or without such a client",
    "zero-out": "the canary takes part, or is asked and contributes nothing",
    "replace-one": "the canary sends one update, or another in its place",
}
