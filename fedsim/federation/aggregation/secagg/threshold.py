"""How many clients a secure sum has, and what it does not go with."""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.errors import FedsimError
from fedsim.privacy.plan import Bounded, ReleasePlan
from fedsim.settings import check_settings


@dataclass(frozen=True)
class SecureAggregation:
    """How many clients a sum must have, and how many of them may collude with the server.

    Parameters
    ----------
    threshold : int
        With fewer survivors nothing is unmasked, and the round is lost, and charged.
    colluders : int
        So many of them may give the server all that they know; the guarantee counts on the noise
        of the others alone.

    Raises
    ------
    FedsimError
        If no client need be honest.
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
        """Refuse what would show the server the sum without noise or clients' metrics, what would
        show the size of a secret cohort, and cohorts of which most would be too small.

        Raises
        ------
        FedsimError
        """
        if unprotected_metrics:
            raise FedsimError(
                "metrics.unprotected = True (evaluate.unprotected); it must be false with secure "
                "aggregation (secagg.threshold), which hides what single clients report."
            )
        plan.check_secure()
        sampled = plan.sampler.expected_size
        if self.threshold > sampled:
            raise FedsimError(
                f"secagg.threshold is {self.threshold}; it must be at most {sampled:g}, the mean "
                "number of clients that the cohort samples: a round with fewer is lost, and "
                "charged."
            )

    @property
    def public(self) -> dict[str, int]:
        """The facts of it in a ledger's line."""
        return {"secagg-threshold": self.threshold, "secagg-colluders": self.colluders}

    @property
    def honest(self) -> int:
        """Honest survivors of every sum: the noise of their shares is what is charged."""
        return self.threshold - self.colluders
