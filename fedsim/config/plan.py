"""From a config to what its privacy follows from: samplers, noise, local work; without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from fedsim.cohorts import Cohort
from fedsim.config.run_config import RunConfig, Scalar
from fedsim.config.sections import DevicesSection
from fedsim.config.things import make
from fedsim.errors import FedsimError
from fedsim.privacy.accountant import Accountant
from fedsim.privacy.entry import Entry
from fedsim.privacy.extrapolation import Extrapolation
from fedsim.privacy.plan import LocalWork
from fedsim.privacy.statement import Statement

__all__ = [
    "beside",
    "cohort",
    "ends_by_releases",
    "entropy",
    "extrapolation",
    "has_devices",
    "local_work",
    "realised",
    "stop_times",
]

_BY_WHAT_IS_RELEASED = ("stopped", "dropped")

_DEVICES = (
    "Who is there, drops out or works how much follows from the seed or from files that are taken "
    "to say nothing of clients' data (devices, client.work)."
)


def cohort(config: RunConfig) -> Cohort:
    """The cohort sampler over the declared population."""
    sampler = make(config.cohort, population=config.partition.clients)
    if not all(callable(getattr(sampler, name, None)) for name in ("draw", "event")):
        raise FedsimError(
            f"cohort.name is '{config.cohort.name}'; it must name a fedsim.cohorts.Cohort."
        )
    chosen: Cohort = sampler
    return chosen


def realised(config: RunConfig) -> RunConfig:
    """The same run said by the noise that is really added.

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


def extrapolation(config: RunConfig, releases: int) -> Extrapolation | None:
    """What so many releases would cost with the cohort whose noise is simulated, if one is."""
    noise = config.noise
    if not noise.cohort_size:
        return None
    assert noise.multiplier is not None
    return Extrapolation.of(_larger_cohort(config), noise.multiplier, releases, noise.delta)


def entropy(config: RunConfig) -> Literal["config", "system"]:
    """Where all draws of a run come from but its partition and its initial model.

    By default from the system in a deployment that draws any noise, a guarantee's or not, and from
    the seed elsewhere: without noise there is nothing to hide, and runs of one seed compare.
    """
    noisy = config.noise.adds_noise or config.client.mechanism.name != "none"
    deployed = config.engine.name == "deployment"
    return config.noise.entropy or ("system" if deployed and noisy else "config")


def stop_times(flat: Mapping[str, Scalar], ended: str, releases: Sequence[Entry]) -> int:
    """After how many rounds what was released might have ended a run, if it did; otherwise 1.

    Parameters
    ----------
    flat : mapping
        Its config by dotted keys.
    ended : str
        As in `RunResult`.
    releases : sequence of Entry
        What it has released itself.
    """
    rounds = flat.get("rounds", 1)
    made = max((entry.round or 0 for entry in releases), default=0)
    decided = ends_by_releases(flat, ended)
    return rounds if decided and isinstance(rounds, int) and made < rounds else 1


def ends_by_releases(flat: Mapping[str, Scalar], ended: str) -> bool:
    """Whether what was released may end such a run, or has ended it; parameters as there."""
    return bool(flat.get("stop.metric")) or ended in _BY_WHAT_IS_RELEASED


def beside(config: RunConfig, statement: Statement) -> Statement:
    """A statement of the server's releases, with what only the config says beside.

    These are the figures that it asks for, and what it takes to say nothing of clients' data.
    """
    figure = extrapolation(config, statement.of_run)
    statement = _within_plan(config, statement)
    note = _DEVICES if config.private and has_devices(config.to_run_config()) else statement.note
    return replace(statement, extrapolated=figure, note=note).of_group(config.privacy.group)


def _within_plan(config: RunConfig, statement: Statement) -> Statement:
    """Epsilon of all rounds that were planned holds too, whatever ended them, and so does a budget.

    Where releases have ended the run, the least of these figures counts.
    """
    if statement.stops == 1 or not statement.private or not statement.charged:
        return statement
    planned = Accountant(entry.event for entry in statement.charged)
    left = statement.stops - statement.of_run
    if left > 0:
        planned.add(statement.charged[-1].event, left)
    least = min(statement.epsilon, planned.epsilon(statement.delta))
    if config.noise.max_epsilon is not None:
        least = min(least, config.noise.max_epsilon)
    return replace(statement, cost=replace(statement.cost, epsilon=least))


def has_devices(flat: Mapping[str, Scalar]) -> bool:
    """Whether a config by dotted keys says who of those drawn is there, or works how much."""
    usual = DevicesSection().model_dump(by_alias=True)
    modelled = any(flat.get(f"devices.{key}", value) != value for key, value in usual.items())
    return modelled or bool(flat.get("client.work"))


def _larger_cohort(config: RunConfig) -> Cohort:
    noise = config.noise
    population = noise.cohort_population or config.partition.clients
    share = {"rate": noise.cohort_size / population, "size": noise.cohort_size}
    key = "rate" if config.cohort.name == "poisson" else "size"
    return cohort(
        config.replace(
            **{
                "partition.clients": population,
                f"cohort.{key}": share[key],
                "noise.cohort-size": 0,
                "noise.cohort-population": 0,
            }
        )
    )


def local_work(config: RunConfig) -> LocalWork:
    """How a client goes through its examples."""
    client = config.client
    return LocalWork(
        client.batch_size, None if client.steps else client.epochs, client.steps or None
    )
