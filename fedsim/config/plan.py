"""Release plans and other privacy objects made from a config, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Literal, TypeVar

from fedsim.cohorts import Cohort
from fedsim.config import devices
from fedsim.config.privacy_sections import NoiseSection
from fedsim.config.run_config import RunConfig, earlier_config
from fedsim.config.values import Scalar
from fedsim.errors import FedsimError
from fedsim.privacy import Event
from fedsim.privacy.accountant import Accountant
from fedsim.privacy.calibration import calibrate
from fedsim.privacy.laws.cyclic import Cyclic
from fedsim.privacy.noise import Noise
from fedsim.privacy.noise.banded import AUTO, MAX_BANDS, Banded
from fedsim.privacy.plan import MechanismLike, ReleasePlan, evaluation_sampler
from fedsim.privacy.statement import Statement

MechanismT = TypeVar("MechanismT", bound=MechanismLike)


def release_plan(config: RunConfig, mechanism: MechanismT) -> ReleasePlan[MechanismT]:
    """The server's release plan, with the config's noise or noise calibrated to its target.

    A target epsilon determines, in this order: the number of groups and bands; the noise of private
    evaluations, from their share of the target; and the noise of the rounds, the least for which
    both together cost the target.
    """
    config = resolve_bands(config)
    plan = uncalibrated_plan(config, mechanism)
    if (target := config.noise.target_epsilon) is None:
        return plan
    return plan.calibrated(target, config.noise.delta, others=evaluation_events(config))


GROUPS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, MAX_BANDS)
"""Candidate numbers of groups, with as many bands."""


def resolve_bands(config: RunConfig) -> RunConfig:
    """Replace ``noise.bands = "auto"`` by the best number of bands and groups.

    With more groups more rounds can be correlated, but a round samples a larger share of its group,
    which amplifies less. All candidates have the config's target epsilon and expected cohort size;
    the one with the least error of sums over rounds is chosen.

    Raises
    ------
    FedsimError
        If the cohort has no groups, or there is no target epsilon.
    """
    noise = make_noise(config.noise)
    if not isinstance(noise, Banded) or noise.bands != AUTO:
        return config
    sampler = cohort(config)
    if not isinstance(sampler, Cyclic) or config.noise.target_epsilon is None:
        raise FedsimError(
            f"noise.bands is 'auto', cohort.name {config.cohort.name!r} and noise.target-epsilon "
            f"{config.noise.target_epsilon or 'not set'}; it must be a number, unless the cohort "
            "is 'cyclic' and the target set."
        )
    rate = sampler.rate / sampler.groups
    candidates: list[tuple[float, RunConfig]] = []
    for groups in GROUPS:
        if groups > config.rounds or groups * rate > 1 + 1e-9:
            break
        changes: dict[str, Scalar] = {
            "noise.bands": groups,
            "cohort.groups": groups,
            "cohort.rate": min(1.0, groups * rate),
        }
        changed = config.replace(**changes)
        # `changed` has a number of bands, so that this call does not come back here.
        noise = release_plan(changed, config.mechanism.make()).noise
        assert isinstance(noise, Banded)
        candidates.append((noise.error(), changed))
    return min(candidates, key=itemgetter(0))[1]


def uncalibrated_plan(config: RunConfig, mechanism: MechanismT) -> ReleasePlan[MechanismT]:
    """The server's release plan; its noise multiplier is 0 if a target determines it."""
    plan = ReleasePlan(
        level="client",
        sampler=cohort(config),
        mechanism=mechanism,
        noise=make_noise(config.noise),
        rounds=config.rounds,
        may_stop=config.private and may_stop(config.to_run_config()),
        cohort_known=config.secagg.cohort_known,
        placement=config.secagg.placement(config.noise),
        weights=config.mechanism.weights,
    )
    return _with_simulated_cohort(plan, config) if config.noise.cohort_size else plan


def _with_simulated_cohort(
    plan: ReleasePlan[MechanismT], config: RunConfig
) -> ReleasePlan[MechanismT]:
    """The plan that simulates the config's larger cohort."""
    noise, other = config.noise, ""
    if not config.private:
        other = "in a run without a mechanism and noise"
    elif config.evaluate.private:
        other = "with evaluate.private = true, whose metrics have noise for the real cohort"
    if other:
        raise FedsimError(f"noise.cohort-size is {noise.cohort_size}; it must be 0 {other}.")
    plan = plan.simulating(noise.cohort_size, noise.cohort_population or config.partition.clients)
    plan.check_entropy("system" if config.engine.name == "deployment" else entropy(config))
    return plan


def cohort(config: RunConfig) -> Cohort:
    """The cohort sampler over the declared population."""
    sampler: Cohort = config.cohort.make(population=config.partition.clients, rounds=config.rounds)
    return sampler


def make_noise(section: NoiseSection) -> Noise:
    """Make the noise that a table names; its multiplier is 0 if none is set."""
    noise: Noise = section.make(multiplier=section.multiplier or 0.0, hardened=section.hardened)
    return noise


def evaluation_events(config: RunConfig) -> list[Event]:
    """Event of all of a run's private evaluations; empty without any."""
    event = evaluation_event(config)
    return [] if event is None else [event.times(config.rounds // config.evaluate.clients_every)]


def evaluation_event(config: RunConfig) -> Event | None:
    """Event of one private evaluation; None without private evaluations.

    Its noise is the config's, or calibrated to its share of the target epsilon.
    """
    evaluate, noise = config.evaluate, config.noise
    if not evaluate.private:
        return None
    sampler, multiplier = evaluation_sampler(cohort(config), evaluate.fraction), evaluate.multiplier
    if multiplier is None:
        assert noise.target_epsilon is not None
        multiplier = calibrate(
            target_epsilon=evaluate.target_share * noise.target_epsilon,
            cohort=sampler,
            rounds=config.rounds // evaluate.clients_every,
            delta=noise.delta,
        )
    return Event.of(sampler, multiplier)


def entropy(config: RunConfig) -> Literal["config", "system"]:
    """Source of all draws of a run except its partition and its initial model.

    The default is "system" in a deployment with any noise, for a guarantee or not, and "config"
    (the seed) elsewhere: without noise nothing is secret, and runs of one seed can be compared.
    """
    noisy = config.noise.adds_noise or config.client.mechanism.name != "none"
    deployed = config.engine.name == "deployment"
    return config.noise.entropy or ("system" if deployed and noisy else "config")


def planned_releases(config: RunConfig) -> list[Event]:
    """Events of all that a run plans to release of whole clients: its rounds and evaluations."""
    plan = uncalibrated_plan(config, config.mechanism.make())
    return [plan.event().over_rounds(config.rounds), *evaluation_events(config)]


def may_stop(flat: Mapping[str, Scalar]) -> bool:
    """Whether a flat config says that what is released may end the run."""
    return bool(flat.get("stop.metric") or flat.get("stop.callbacks"))


def with_assumptions(
    flat: Mapping[str, Scalar], statement: Statement, path: Path, *, cut_short: bool
) -> Statement:
    """The server's statement with the config's assumptions.

    The full config, which may be another version's, is read only if one of these needs it.

    Parameters
    ----------
    flat : mapping
        The run's config by dotted keys.
    statement : Statement
    path : path
        The config's file, for messages.
    cut_short : bool
        Whether the run has ended before its planned rounds, and nothing says why.

    Raises
    ------
    FedsimError
        If such a config cannot be read by this version.
    """
    assumed = cut_short and statement.private and not may_stop(flat)
    of_devices = devices.assumption(flat)
    if not (of_devices or assumed):
        return statement
    config = earlier_config(path, flat)
    notes = [of_devices] if config.private else []
    if assumed and config.private and not release_plan(config, config.mechanism.make()).closed:
        notes.append(_early_end_assumption(config, statement))
    return replace(
        statement, added_sentence=" ".join(filter(None, [statement.added_sentence, *notes]))
    )


def _early_end_assumption(config: RunConfig, statement: Statement) -> str:
    """What a run that has ended early assumes, and what all its planned rounds would cost."""
    made = max((entry.round or 0 for entry in statement.entries), default=0)
    plan = release_plan(config, config.mechanism.make())
    rest = plan.event().further_rounds(max(config.rounds - made, 0), made)
    total = Accountant([*statement.events, *([rest] if rest.count else [])])
    return (
        f"Assumed: that the run has ended after {made:,} of {config.rounds:,} planned rounds does "
        f"not follow from what it released; all of them would cost epsilon "
        f"{total.epsilon(statement.delta):.4g}."
    )
