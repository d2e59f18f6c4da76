"""What a config says of its releases: samplers, noise, local work; without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Literal, TypeVar

from fedsim.cohorts import Cohort
from fedsim.config.privacy_sections import ClientNoiseSection, NoiseSection
from fedsim.config.run_config import RunConfig, past_config
from fedsim.config.sections import DevicesSection
from fedsim.config.values import Scalar
from fedsim.errors import FedsimError
from fedsim.privacy import Event
from fedsim.privacy.calibration import calibrate
from fedsim.privacy.claims import FIXED, Extrapolation, Stopping
from fedsim.privacy.laws.cyclic import Cyclic
from fedsim.privacy.laws.selection import Selection
from fedsim.privacy.local_work import LocalWork
from fedsim.privacy.noise import Noise
from fedsim.privacy.noise.banded import AUTO, MOST_BANDS, Banded
from fedsim.privacy.plan import Bounded, ReleasePlan, evaluation_sampler
from fedsim.privacy.statement import Statement

BoundOf = TypeVar("BoundOf", bound=Bounded)

_BY_WHAT_IS_RELEASED = ("stopped", "dropped")

_DEVICES = (
    "Which clients are available, drop out or do how much work follows from the seed or from files "
    "that are assumed to be independent of clients' data (devices, client.work)."
)


def release_plan(config: RunConfig, bound: BoundOf) -> ReleasePlan[BoundOf]:
    """What the server releases, with the noise that the config says or its target needs.

    A target epsilon decides in this order: how many groups and bands there are; the noise of the
    private evaluations, from their share of the target; and that of the rounds, the least with
    which both together cost the target.
    """
    config = with_best_groups(config)
    plan = uncalibrated_plan(config, bound)
    if (target := config.noise.target_epsilon) is None:
        return plan
    return plan.calibrated(target, planned_delta(config), others=evaluation_events(config))


GROUPS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, MOST_BANDS)
"""How many groups, of one band each, are compared."""


def with_best_groups(config: RunConfig) -> RunConfig:
    """A config whose ``noise.bands`` are ``auto``, with as many bands and groups as are best.

    With more groups more rounds can be correlated, but a round samples a larger share of its group,
    which amplifies less. Candidates have the config's target epsilon and expected cohort size; the
    one whose sums over rounds have the least error is taken.

    Raises
    ------
    FedsimError
        If the cohort has no groups, or no epsilon is aimed at.
    """
    noise = made_noise(config.noise)
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
        # Its bands are a number: nothing is chosen within the choice.
        noise = release_plan(changed, config.mechanism.make()).noise
        assert isinstance(noise, Banded)
        candidates.append((noise.error(), changed))
    return min(candidates, key=itemgetter(0))[1]


def uncalibrated_plan(config: RunConfig, bound: BoundOf) -> ReleasePlan[BoundOf]:
    """What the server releases, with a noise multiplier of 0 where a target decides it."""
    privacy, secagg = config.privacy, config.secagg
    selected = privacy.selection and Selection(privacy.selection, privacy.selection_mean)
    plan = ReleasePlan(
        level="client",
        sampler=cohort(config),
        bound=bound,
        noise=made_noise(with_added_noise(config).noise),
        rounds=config.rounds,
        selection=selected or None,
        # The server knows the sampled clients: against it sampling amplifies nothing.
        cohort_known=secagg.threshold > 0 and secagg.observer == "server",
    )
    if secagg.threshold:
        plan.check_secure()
    return plan


def cohort(config: RunConfig) -> Cohort:
    """The cohort sampler over the declared population."""
    sampler: Cohort = config.cohort.make(population=config.partition.clients, rounds=config.rounds)
    return sampler


def made_noise(section: NoiseSection | ClientNoiseSection) -> Noise:
    """The noise that a table names, with a multiplier of 0 where none is set."""
    noise: Noise = section.make(multiplier=section.multiplier or 0.0, hardened=section.hardened)
    return noise


def with_added_noise(config: RunConfig) -> RunConfig:
    """The same run, configured by the noise that is added.

    The noise of a larger cohort on the mean (``noise.cohort-size``) is less noise on the sum over
    the cohort that is drawn: by the one's expected size over the other's size.
    """
    noise = config.noise
    if not noise.cohort_size:
        return config
    assert noise.multiplier is not None
    drawn = cohort(config).expected_size
    return config.replace(
        **{
            "noise.multiplier": noise.multiplier * drawn / noise.cohort_size,
            "noise.cohort-size": 0,
            "noise.cohort-population": 0,
        }
    )


def evaluation_events(config: RunConfig) -> list[Event]:
    """What all of a run's private evaluations cost."""
    event = evaluation_event(config)
    return [] if event is None else [event.times(config.rounds // config.evaluate.clients_every)]


def evaluation_event(config: RunConfig) -> Event | None:
    """What one private evaluation costs; None without private evaluations.

    Its noise is the config's, or calibrated to the config's share of the target epsilon.
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
            delta=planned_delta(config),
        )
    return Event.of(sampler, multiplier)


def planned_delta(config: RunConfig) -> float:
    """Where all planned rounds are accounted for."""
    return Stopping(times=declares_stops(config.to_run_config())).planned_delta(config.noise.delta)


def extrapolation(config: RunConfig, releases: int) -> Extrapolation | None:
    """What so many releases would cost with the larger cohort whose noise is simulated, if any."""
    noise = config.noise
    if not noise.cohort_size:
        return None
    assert noise.multiplier is not None
    population = noise.cohort_population or config.partition.clients
    law = cohort(config).law().sampled(noise.cohort_size, population)
    return Extrapolation.of(law, population, noise.multiplier, releases, noise.delta)


def entropy(config: RunConfig) -> Literal["config", "system"]:
    """Where all draws of a run come from but its partition and its initial model.

    By default from the system in a deployment that draws any noise, a guarantee's or not, and from
    the seed elsewhere: without noise there is nothing to hide, and runs of one seed compare.
    """
    noisy = config.noise.adds_noise or config.client.mechanism.name != "none"
    deployed = config.engine.name == "deployment"
    return config.noise.entropy or ("system" if deployed and noisy else "config")


def stopping(flat: Mapping[str, Scalar], made: int = 0, ended: str = "") -> Stopping:
    """How far a run was to go, and whether what it has released may end it before.

    Parameters
    ----------
    flat : mapping
        Its config by dotted keys.
    made : int
        Rounds that it has made.
    ended : str
        As in `RunResult`, once it has.
    """
    declared, rounds = declares_stops(flat), flat.get("rounds")
    if not isinstance(rounds, int) or not (declared or ended in _BY_WHAT_IS_RELEASED):
        return FIXED
    budget, delta = flat.get("noise.max-epsilon"), flat.get("noise.delta")
    evaluation = None
    if flat.get("evaluate.private"):
        evaluation = evaluation_event(past_config(Path("config.toml"), flat))
    every = flat.get("evaluate.clients-every")
    return Stopping(
        times=rounds if declared else 0,
        left=rounds,
        evaluation=evaluation,
        evaluation_every=every if isinstance(every, int) and every else 1,
        max_epsilon=budget if isinstance(budget, int | float) else None,
        budget_delta=delta if isinstance(delta, float) else math.inf,
    ).after(made)


def whole_run(config: RunConfig) -> Stopping:
    """All that a run may come to release: its rounds and its private evaluations."""
    return Stopping(
        left=config.rounds,
        evaluation=evaluation_event(config),
        evaluation_every=config.evaluate.clients_every or 1,
    )


def declares_stops(flat: Mapping[str, Scalar]) -> bool:
    """Whether a config by dotted keys says that what is released may end the run."""
    return bool(flat.get("stop.metric") or flat.get("stop.callbacks"))


def with_config_figures(
    flat: Mapping[str, Scalar], statement: Statement, ledger: Path | None
) -> Statement:
    """A statement of the server's releases, with the figures and assumptions of the config.

    The config of a run of another version is read only where one of its dotted keys needs it; its
    file lies in the directory of the ``ledger``.

    Raises
    ------
    FedsimError
        If such a config cannot be read by this version.
    """
    grouped = flat.get("privacy.group", 1) != 1
    if not (grouped or flat.get("noise.cohort-size") or has_devices(flat)):
        return statement
    config = past_config((Path("") if ledger is None else ledger.parent) / "config.toml", flat)
    figure = extrapolation(config, statement.of_run)
    note = _DEVICES if config.private and has_devices(flat) else statement.note
    return replace(statement, extrapolated=figure, note=note).of_group(config.privacy.group)


def has_devices(flat: Mapping[str, Scalar]) -> bool:
    """Whether a config by dotted keys has a model of devices, or of clients' work."""
    usual = DevicesSection().to_tree()
    modelled = any(flat.get(f"devices.{key}", value) != value for key, value in usual.items())
    return modelled or bool(flat.get("client.work"))


def local_work(config: RunConfig) -> LocalWork:
    """How a client goes through its examples."""
    client = config.client
    return LocalWork(
        client.batch_size, None if client.steps else client.epochs, client.steps or None
    )
