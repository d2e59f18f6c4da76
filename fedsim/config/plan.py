"""From a config to what its privacy follows from: samplers and local work, without torch."""

from __future__ import annotations

from fedsim.cohorts import Cohort, FixedCohort, FullCohort, PoissonCohort
from fedsim.config.run_config import RunConfig
from fedsim.privacy.plan import LocalWork

__all__ = ["cohort", "local_work"]


def cohort(config: RunConfig) -> Cohort:
    """The cohort sampler over the declared population."""
    settings, population = config.cohort, config.partition.clients
    match settings.name:
        case "poisson":
            return PoissonCohort(rate=settings.rate, population=population)
        case "fixed":
            return FixedCohort(size=settings.size, population=population)
        case "full":
            return FullCohort(population=population)


def local_work(config: RunConfig) -> LocalWork:
    """How a client goes through its examples."""
    client = config.client
    return LocalWork(
        client.batch_size, None if client.steps else client.epochs, client.steps or None
    )
