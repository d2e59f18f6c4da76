"""Settings of a strategy about its clients: how they train, and which metrics are shown.

Both classes check themselves against the strategy's other settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from fedsim.arguments import as_text
from fedsim.array_types import Ints
from fedsim.clients.base import LocalAlgorithm, refuse_vectors
from fedsim.cohorts import Cohort
from fedsim.errors import FedsimError
from fedsim.federation.exchange import Recipients
from fedsim.federation.round_report import RoundReport
from fedsim.mechanisms import Clipping, Mechanism, NoPrivacy
from fedsim.mechanisms.bounded_values import ValueRange, joint_norm
from fedsim.privacy.exclusions import check_private_metrics, refuse_bare_metrics
from fedsim.privacy.noise import Independent
from fedsim.privacy.plan import ReleasePlan, evaluation_sampler
from fedsim.settings import Ge, check_settings

Plan = ReleasePlan[Mechanism]

ChargeExamples = Callable[[Ints, int, bool], Mapping[int, str]]
"""Function of ``(client ids, round, partly)`` that records what these clients will release of their
examples, and returns those whose budgets do not allow it, and why; see `Trainer.charge`."""


@dataclass(frozen=True, kw_only=True)
class ClientTraining:
    """How clients train, as far as the strategy depends on it.

    Parameters
    ----------
    algorithm : LocalAlgorithm, optional
        The clients' algorithm, if it sends or receives named vectors in addition to updates
        (SCAFFOLD's control variates), which it combines on the server.
    private_examples : bool
        Whether clients protect their own examples (example-level privacy). Their reports and
        failures are then treated as in a private run, whatever the mechanism.
    example_counts : sequence of int, optional
        Each client's number of examples, declared public. Updates are weighted by these and not by
        what clients report; updates of clients with private examples can have no other weights.
    charge : callable ``(client ids, round, partly) -> mapping of int to str``, optional
        Called before clients on this machine are sent messages: records what they will release of
        their examples, and returns those whose budgets do not allow it, with the reason. One of
        them ends the run, unless the run is private at client level: that would reveal the cohort,
        and they are left out. Clients elsewhere charge themselves; since an untrusted one may claim
        falsely that its budget is spent, it is left out alone, and the run ends if all clients
        asked (at least two) say so.
    """

    algorithm: LocalAlgorithm | None = None
    private_examples: bool = False
    example_counts: Sequence[int] | None = None
    charge: ChargeExamples | None = None

    def __post_init__(self) -> None:
        check_settings(self)

    def check(self, plan: Plan) -> None:
        """Refuse settings that are incompatible with the plan.

        Raises
        ------
        FedsimError
        """
        weighs = plan.mechanism.weighting == "num-examples" and not plan.weights
        if self.private_examples and weighs and self.example_counts is None:
            raise FedsimError(
                "clients.example_counts is None, but clients protect their examples and their "
                "updates are weighed by num-examples (mechanism.weighting); declare the counts, "
                "which are then public, or weigh uniformly."
            )
        if self.algorithm is not None:
            self._check_algorithm(self.algorithm, plan)

    def _check_algorithm(self, algorithm: LocalAlgorithm, plan: Plan) -> None:
        """Refuse vectors in a private run, and weights or bounds where means must be plain."""
        mechanism = plan.mechanism
        has_vectors = algorithm.sends or algorithm.receives
        if plan.weights and (algorithm.requires_plain_means or has_vectors):
            raise FedsimError(
                f"mechanism.weights weighs what clients send, but {algorithm.label} (client.name) "
                "needs its plain mean; it must be empty."
            )
        if plan.private or self.private_examples:
            refuse_vectors(algorithm)
        # A mechanism scales the vectors that are sent together with the update. An algorithm that
        # sends none and needs plain means applies the same mechanism itself.
        is_harmed = (
            algorithm.requires_plain_means
            if mechanism.guarantee == "none"
            else bool(algorithm.sends)
        )
        if mechanism == NoPrivacy("uniform") or not is_harmed:
            return
        name = algorithm.label
        if type(mechanism) is NoPrivacy:
            raise FedsimError(
                f"mechanism.weighting is '{mechanism.weighting}', which weighs what clients send, "
                f"but {name} (client.name) needs its plain mean; it must be 'uniform'."
            )
        must = (
            "with mechanism.weighting = 'uniform'"
            if algorithm.requires_plain_means
            else "unless clients send their update alone (FedNova does with client.reach)"
        )
        raise FedsimError(
            f"{type(mechanism).__name__} (mechanism.name) weighs or bounds what clients send, but "
            f"{name} (client.name) needs its plain mean; it must be 'none' {must}."
        )

    def counts(self, population: int | None) -> npt.NDArray[np.float64] | None:
        """The declared example counts by client id, ``[population]``.

        Raises
        ------
        FedsimError
            If there is not one for each client.
        """
        counts = self.example_counts
        if counts is None:
            return None
        if len(counts) != population or min(counts) < 0:
            raise FedsimError(
                f"clients.example_counts has {len(counts)} numbers; it must have one, 0 or more, "
                f"for each of the {population} clients of the population."
            )
        return np.asarray(counts, dtype=np.float64)

    def charge_recipients(
        self, recipients: Recipients, server_round: int, *, private: bool
    ) -> tuple[Recipients, str | None]:
        """Charge the recipients' examples for a round, before they are asked.

        Returns
        -------
        Recipients
            Those who may be asked; in a private run without those whose budgets are spent.
        str or None
            Why the run ends; None if it does not.
        """
        if self.charge is None:
            return recipients, None
        ids = recipients.client_ids
        refused = self.charge(ids, server_round, private)
        if refused and not private:
            return recipients, next(iter(refused.values()))
        allowed = np.array([client not in refused for client in ids.tolist()], dtype=np.bool_)
        absent = recipients.absent + len(refused)
        return Recipients(ids[allowed], recipients.node_ids[allowed], absent), None

    def budgets_spent(self, report: RoundReport) -> str | None:
        """Why clients' replies about spent budgets end the run; None if they do not."""
        count = report.reasons.get("budget", 0)
        if not (self.private_examples and 1 < count == report.asked):
            return None
        return (
            f"round {report.round} would exceed client.noise.max-epsilon of {count} of the clients "
            "asked"
        )


@dataclass(frozen=True)
class PrivateMetrics:
    """Metrics of clients that are released with noise, and the noise multiplier.

    Guarantee: an evaluation is one Gaussian mechanism with this multiplier. Its sum changes by at
    most C with one client: the norm of all the client's clamped numbers together.

    Parameters
    ----------
    ranges : sequence of ValueRange
        Range of each released metric; other metrics are not released.
    noise_multiplier : float
    hardened : bool
        As ``hardened_noise`` of `DPFedAvg`.

    Raises
    ------
    FedsimError
        If there is no metric, or a duplicate, or if a setting is out of its range.
    """

    ranges: Sequence[ValueRange]
    noise_multiplier: Annotated[float, Ge(0)]
    hardened: bool = True

    def __post_init__(self) -> None:
        check_settings(self)
        if not len(self.ranges) or not all(isinstance(entry, ValueRange) for entry in self.ranges):
            raise FedsimError(
                f"ranges is {as_text(self.ranges)}; it must be one ValueRange or more, such as "
                "[ValueRange('loss', 0.0, 5.0)]."
            )
        if len({entry.name for entry in self.ranges}) < len(self.ranges):
            raise FedsimError(
                f"ranges has {', '.join(entry.name for entry in self.ranges)}; each metric must be "
                "there once."
            )

    def plan(self, cohort: Cohort, fraction: float) -> ReleasePlan[Clipping]:
        """Release plan of one evaluation by this fraction of the cohort's population."""
        return ReleasePlan(
            level="client",
            sampler=evaluation_sampler(cohort, fraction),
            mechanism=Clipping(joint_norm(self.ranges)),
            noise=Independent(self.noise_multiplier, self.hardened),
        )

    @property
    def released_names(self) -> tuple[str, ...]:
        """Names of the numbers that an evaluation releases."""
        return tuple(name for entry in self.ranges for name in entry.result_names)


@dataclass(frozen=True, kw_only=True)
class ClientMetrics:
    """Which of the metrics that clients report are shown, or released with noise.

    Parameters
    ----------
    every : int
        Number of rounds from one evaluation by clients to the next.
    quantiles : bool
        Whether quantiles over clients are shown in addition to the means of their evaluations.
    private : PrivateMetrics, optional
        Release clients' evaluations with noise: each is one more release of a private run, in the
        same ledger and budget. ``fraction_evaluate`` is then the rate at which clients are sampled
        for it; 1 by default.
    unprotected : bool
        Whether clients' metrics may be aggregated, without noise, in a private run.
    """

    every: Annotated[int, Ge(1)] = 1
    quantiles: bool = False
    private: PrivateMetrics | None = None
    unprotected: bool = False

    def __post_init__(self) -> None:
        check_settings(self)

    def check(self, plan: Plan, *, private_examples: bool, aggregate: object) -> None:
        """Refuse private metrics that have no budget, or that the server would see without noise.

        Raises
        ------
        FedsimError
        """
        if self.private is None:
            return
        check_private_metrics(private=plan.private, private_examples=private_examples)
        if aggregate is not None:
            raise FedsimError(
                "metrics.private is given; it must be left out together with "
                "evaluate_metrics_aggr_fn, which would see metrics without noise."
            )

    def fraction(self, fraction_evaluate: float | None, *, protects: bool) -> float:
        """Fraction of the clients that evaluate; by default 1, or 0 if their metrics are protected.

        Raises
        ------
        FedsimError
        """
        allowed = self.unprotected or self.private is not None or not protects
        if fraction_evaluate is None:
            return 1.0 if allowed else 0.0
        if not 0 <= fraction_evaluate <= 1:
            raise FedsimError(
                f"fraction_evaluate is {fraction_evaluate}; it must be between 0 and 1."
            )
        if fraction_evaluate == 0 and self.private is not None:
            raise FedsimError(
                "fraction_evaluate is 0, so that no client would report the metrics of "
                "metrics.private; it must be above 0, or metrics.private must be left out."
            )
        if fraction_evaluate > 0 and not allowed:
            refuse_bare_metrics(f"fraction_evaluate = {fraction_evaluate}")
        return fraction_evaluate
