"""Secure aggregation: the server learns only the sum of a minimum number of clients' shares.

The protocol of Bonawitz et al. (2017) over Flower messages of one type, in four stages: public
keys, shares of each client's secrets, the masked vector, and the secrets that unmask the sum.
`protocol` has the format of the messages and the cryptography, `client` the replies of a client,
`server` the aggregation, and this module the settings.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.errors import FedsimError
from fedsim.privacy.laws import Sampler
from fedsim.privacy.plan import Bounded, ReleasePlan
from fedsim.settings import check_settings


@dataclass(frozen=True)
class SecureAggregation:
    """Minimum number of clients in a sum, and number that may collude with the server.

    Parameters
    ----------
    threshold : int
        Minimum number of survivors; with fewer nothing is unmasked: the round is lost, and charged.
    colluders : int
        Number of clients that may share all they know with the server; the guarantee relies on the
        noise of the others alone.

    Raises
    ------
    FedsimError
        If the threshold is below 2 or does not exceed the number of colluders.
    """

    threshold: int
    colluders: int = 0

    def __post_init__(self) -> None:
        check_settings(self)
        if not 0 <= self.colluders < self.threshold or self.threshold < 2:
            raise FedsimError(
                f"secagg.threshold = {self.threshold} with secagg.colluders = {self.colluders}; "
                "it must be at least 2, and more than the colluders."
            )

    def check(self, plan: ReleasePlan[Bounded], *, unprotected_metrics: bool) -> None:
        """Refuse settings that secure aggregation cannot protect, or whose rounds would be lost.

        These would show the server clients' metrics, a sum without noise, or the size of a secret
        cohort; or the cohort is on average smaller than the threshold.

        Raises
        ------
        FedsimError
        """
        self.check_round(plan.sampler, unprotected_metrics=unprotected_metrics)
        self.check_plan(plan)

    def check_plan(self, plan: ReleasePlan[Bounded]) -> None:
        """Refuse a plan whose cohorts have a size that is secret, and that the sums would reveal.

        Each client's share of the noise has a fixed variance. A sum of more clients therefore has
        more noise, and one of too few clients is lost. Both can be seen in the models.

        Raises
        ------
        FedsimError
            If neighbouring populations have cohorts of different sizes.
        """
        if not plan.cohort_known and plan.sampler.adjacency == "add-remove":
            raise FedsimError(
                "secagg.observer = 'outsider' (cohort_known = False) with the cohort "
                f"'{plan.sampler.name}', whose size is secret; it must be 'server', or the cohort "
                "'fixed' or 'full': a sum of more clients has more noise, which models show."
            )

    def check_round(self, sampler: Sampler, *, unprotected_metrics: bool) -> None:
        """Refuse metrics of single clients, and cohorts that are smaller than the threshold.

        Raises
        ------
        FedsimError
        """
        if unprotected_metrics:
            raise FedsimError(
                "evaluate.unprotected is true (metrics.unprotected); it must be false with secure "
                "aggregation (secagg.threshold), which hides what single clients report."
            )
        sampled = sampler.expected_size
        if self.threshold > sampled:
            raise FedsimError(
                f"secagg.threshold is {self.threshold}; it must be at most {sampled:g}, the mean "
                "number of clients that the cohort samples: a round with fewer is lost, and "
                "charged."
            )

    @property
    def public(self) -> dict[str, int]:
        """Public facts for the ledger's lines."""
        return {"secagg-threshold": self.threshold, "secagg-colluders": self.colluders}

    @property
    def honest(self) -> int:
        """Minimum number of honest survivors in a sum, whose noise is what the ledger charges."""
        return self.threshold - self.colluders
