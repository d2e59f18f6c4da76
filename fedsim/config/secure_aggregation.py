"""Secure aggregation in a config: the table ``[secagg]``, and the placement of noise with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fedsim.config.tables import OUTSIDE_RELEASE, ConfigTable, Needs, Refusals
from fedsim.privacy.placement import PLACEMENTS, Placement, SecureAggregation
from fedsim.settings import Ge


@dataclass(frozen=True, init=False)
class SecAggSection(ConfigTable, table="secagg"):
    """Secure aggregation: the server learns only the sum of clients' noisy shares."""

    threshold: Annotated[int, Ge(0)] = 0
    """The fewest clients in a masked sum: with fewer the round is lost, and charged nevertheless. 0
    for no secure aggregation."""
    colluders: Annotated[int, Needs("threshold"), Ge(0)] = 0
    """How many clients may collude with the server: only the noise of threshold - colluders clients
    is relied on."""
    observer: Literal["server", "outsider"] = "server"
    """The adversary: 'server', which knows who was sampled, so that sampling amplifies nothing; or
    'outsider', who sees the models only."""
    simulate: Annotated[bool, OUTSIDE_RELEASE] = False
    """Whether engine 'local' sends masked messages, instead of the same shares without masks."""

    def placement(self, noise: Any) -> Placement:
        """Who adds the noise: as the table ``noise`` says, or under masks if this one does."""
        if self.threshold:
            return SecureAggregation(self.threshold, self.colluders)
        return PLACEMENTS[noise.placement]

    @property
    def cohort_known(self) -> bool:
        """Whether the adversary is a server that knows who is sampled: no amplification."""
        return self.threshold > 0 and self.observer == "server"

    def refusals(self, config: Any) -> Refusals:
        """Without noise of its own a sum is not protected; and where masks are not simulated."""
        at_clients = PLACEMENTS[config.noise.placement].at_clients
        if self.threshold and not (config.private and at_clients):
            yield (
                "secagg.threshold",
                "0, or noise.placement = 'client' with a mechanism and noise: the server sees the "
                "sum, which only clients' own noise protects from it",
            )
        if self.simulate and not (self.threshold and config.engine.name == "local"):
            yield (
                "secagg.simulate",
                "false without secagg.threshold or on other engines: 'simulation' and 'deployment' "
                "mask always, and 'ray' never does",
            )

    def check(self, config: Any) -> None:
        """Make the placement, and compare it with the metrics, and with fedsim's own cohorts."""
        placement, cohort, evaluate = self.placement(config.noise), config.cohort, config.evaluate
        placement.check_metrics(private=evaluate.private, unprotected=evaluate.unprotected)
        if not cohort.has_options(cohort.name):
            sampler = cohort.make(population=config.partition.clients, rounds=config.rounds)
            placement.check_cohort(sampler, known=self.cohort_known)
