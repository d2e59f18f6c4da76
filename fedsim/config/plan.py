"""From a config to what its privacy follows from: samplers and local work, without torch."""

from __future__ import annotations

from fedsim.cohorts import Cohort
from fedsim.config.run_config import RunConfig
from fedsim.config.things import make
from fedsim.errors import FedsimError
from fedsim.privacy.plan import LocalWork

__all__ = ["cohort", "local_work"]


def cohort(config: RunConfig) -> Cohort:
    """The cohort sampler over the declared population."""
    sampler = make(config.cohort, population=config.partition.clients)
    if not all(callable(getattr(sampler, name, None)) for name in ("draw", "event")):
        raise FedsimError(
            f"cohort.name is '{config.cohort.name}'; it must name a fedsim.cohorts.Cohort."
        )
    chosen: Cohort = sampler
    return chosen


def local_work(config: RunConfig) -> LocalWork:
    """How a client goes through its examples."""
    client = config.client
    return LocalWork(
        client.batch_size, None if client.steps else client.epochs, client.steps or None
    )
