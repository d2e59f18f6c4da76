"""DP-FedAvg as a Flower strategy: its keywords, and the parts of a round that they configure."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

from flwr.serverapp import PrivacySpent
from flwr.serverapp.strategy import Strategy

from fedsim.arguments import check_arguments
from fedsim.cohorts import Cohort
from fedsim.errors import FedsimError
from fedsim.federation.accounting import Accounting, keyed_randomness
from fedsim.federation.aggregation.robust import RobustMean
from fedsim.federation.aggregation.secagg.server import SecureSum
from fedsim.federation.aggregation.server_sum import (
    Aggregation,
    AggregationSettings,
    RobustAggregation,
    ServerSum,
)
from fedsim.federation.aggregation.share_sums import ClientShares
from fedsim.federation.buffered.real_time import (
    ArrivingRequests,
    RealTimeSum,
    Requests,
    ScheduledRequests,
)
from fedsim.federation.buffered.schedule import LATENESS
from fedsim.federation.buffered.sums import BufferedSum, InFlight, check_buffered
from fedsim.federation.client_metrics import ClientEvaluation, MetricsAggregator, TrainMetrics
from fedsim.federation.client_settings import ClientMetrics, ClientTraining, Plan
from fedsim.federation.exchange import RecordKeys
from fedsim.federation.extras import Extra, NamedVectors
from fedsim.federation.optimizers import FlowerOptimizer, StrategyConfig
from fedsim.federation.participants import Availability, Participants
from fedsim.federation.private_metrics import PrivateEvaluation
from fedsim.federation.private_rounds import PrivateRounds
from fedsim.federation.round_report import Failures, empty_sum
from fedsim.federation.strategy_checks import (
    in_existing_folder,
    refuse_keywords,
)
from fedsim.mechanisms import Mechanism
from fedsim.privacy import Ledger, Statement
from fedsim.privacy.assumptions import ReleaseSetting
from fedsim.privacy.exclusions import check_budget
from fedsim.privacy.flower_records import privacy_spent
from fedsim.privacy.laws.buffered import Buffered
from fedsim.privacy.noise import Independent
from fedsim.privacy.placement import (
    PLACEMENTS,
    SERVER,
    NoiseShares,
    Placement,
    PlacementName,
    SecureAggregation,
)
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Randomness
from fedsim.server_optimizers import ServerOptimizer, ServerSGD


class DPFedAvg(PrivateRounds):
    """Federated averaging with client-level differential privacy (Das et al., Algorithm 1).

    The guarantee covers the sequence of global models. It holds under any loop that calls
    `configure_train` and `aggregate_train` in turn: the cohort is drawn and the budget
    checked in the first; the second writes the release to the ledger before it is made.

    A private round whose cohort was drawn is always released and charged, however many clients
    fail: if none was usable, the release is noise alone, and still a step. Failures are counted
    and never end a private run, since clients may fail because of their data. A round is lost only
    if no node can be reached at all, or if fewer clients than secure aggregation needs remain.

    Parameters
    ----------
    plan : ReleasePlan, optional
        What every round releases: cohort, mechanism and noise in one value. Without it the next
        three keywords, ``placement`` and ``hardened_noise`` make one.
    mechanism : Mechanism
        Bounds, sums and noises the updates. `NoPrivacy("uniform")` makes this FedAvg; a robust mean
        (`Krum`, `Median`, `TrimmedMean`), without privacy, takes the place of the sum.
    cohort : Cohort
        Samples the clients of a round. Its population is declared, and the mean's denominator
        follows from it, never from the number of replies.
    noise_multiplier : float
        Standard deviation of the noise on the sum, as a multiple of the bound; 0.0 for none. It
        must be given, unless the mechanism gives no guarantee.
    delta : float
        Delta at which epsilon is reported.
    max_epsilon : float, optional
        Budget: no release is made that would exceed it.
    rounds : int, optional
        Number of rounds of the plan; those of ``start`` may be fewer.
    may_stop : bool
        Whether what is released may end the run before them: all ``rounds`` are then charged before
        the first.
    ledger : Ledger or path, optional
        Records releases; in memory by default. Runs whose costs must add up name one ledger.
    seed : int or Randomness, optional
        Keys the cohorts, the noise and the evaluation samples. By default they come from the
        operating system, as they must wherever the guarantee has to hold outside a simulation.
        With a whole number, noise is keyed by it and by a digest of the settings given here: runs
        of one seed with different settings share no noise. Runs whose clients do different work
        must have different seeds. A `Randomness` carries a digest of all that determines the
        releases.
    server_optimizer : ServerOptimizer or Flower Strategy, optional
        Applied to the noisy mean; by default the mean is added unchanged. A Flower strategy must be
        one that refines FedAvg's mean: `FedAdam`, `FedYogi`, `FedAvgM`, ... It is used as it is,
        with its momentum: give each run a new one. Of a server optimiser a copy is used.
    placement : "server", "client" or SecureAggregation, optional
        Where noise is drawn: once on the sum (the default), or in the shares of the n sampled
        clients, each of variance ``z^2 C^2 / n`` (with full participation, Das et al.'s own form),
        while the server adds the noise of missing clients. The total is the same. With a
        `SecureAggregation` shares are summed under masks, so that the server sees none of them.
        Each share then has so much noise that the smallest allowed number of honest clients
        contributes all of it. Clients that train in this process add the same shares without masks.
    hardened_noise : bool
        Whether noise is drawn so that floating-point artefacts do not reveal the sum
        (`NoiseSource`).
    clients : ClientTraining
        How clients train, as far as the strategy depends on it: algorithm, example privacy, ...
    metrics : ClientMetrics
        Which of the metrics that clients report are shown, or released with noise.
    availability : Availability
        Which clients can be reached, and how long to wait for them.
    fraction_evaluate : float, optional
        Fraction of the clients that evaluate the model. Their metrics are shown without noise, so
        it is 0 by default in a private run, which needs ``ClientMetrics(unprotected=True)`` for
        more.
    min_available_nodes : int
        Clients to wait for before a round, for at most ``Availability.node_timeout`` seconds; in a
        private run before the first round only.
    weighted_by_key, arrayrecord_key, configrecord_key, train_metrics_aggr_fn, \
evaluate_metrics_aggr_fn
        As for Flower's `FedAvg`. ``weighted_by_key`` weights metrics, and updates only under
        ``NoPrivacy(weighting="num-examples")``.
    **flower_keywords
        Other keywords of Flower's strategies; refused with an error that names the one to use here.

    Raises
    ------
    FedsimError
        If a setting is impossible or would void the guarantee.
    """

    @check_arguments
    def __init__(
        self,
        *,
        plan: Plan | None = None,
        mechanism: Mechanism | None = None,
        cohort: Cohort | None = None,
        noise_multiplier: float | None = None,
        delta: float = 1e-5,
        max_epsilon: float | None = None,
        rounds: int | None = None,
        may_stop: bool = False,
        ledger: Ledger | str | PathLike[str] | None = None,
        seed: int | Randomness | None = None,
        server_optimizer: ServerOptimizer | Strategy | None = None,
        placement: PlacementName | SecureAggregation | None = None,
        hardened_noise: bool | None = None,
        clients: ClientTraining = ClientTraining(),
        metrics: ClientMetrics = ClientMetrics(),
        availability: Availability = Availability(),
        fraction_evaluate: float | None = None,
        min_available_nodes: int = 1,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsAggregator | None = None,
        evaluate_metrics_aggr_fn: MetricsAggregator | None = None,
        **flower_keywords: object,
    ) -> None:
        super().__init__()
        refuse_keywords(DPFedAvg.__init__, flower_keywords)
        plan = _plan_of_keywords(
            plan,
            mechanism=mechanism,
            cohort=cohort,
            noise_multiplier=noise_multiplier,
            hardened_noise=hardened_noise,
            rounds=rounds,
            may_stop=may_stop or None,
            placement=PLACEMENTS[placement] if isinstance(placement, str) else placement,
        )
        self.plan, self.private, self.delta = plan, plan.private, delta
        self.protects = plan.private or clients.private_examples
        self.shows_clients = not self.protects or metrics.unprotected
        check_budget(max_epsilon, private=plan.private)
        clients.check(plan)
        plan.placement.check_metrics(
            private=metrics.private is not None, unprotected=metrics.unprotected
        )
        metrics.check(
            plan,
            private_examples=clients.private_examples,
            aggregate=evaluate_metrics_aggr_fn,
        )
        check_buffered(
            plan,
            availability.schedule,
            clients.algorithm,
            real_time=availability.real_time,
            protects=self.protects,
        )
        if isinstance(plan.mechanism, RobustMean):
            plan.mechanism.check(plan.sampler.expected_size)
        server_optimizer = server_optimizer or ServerSGD()
        # These names enter the digest that keys the noise: renaming one changes seeded runs.
        settings = {
            "algorithm": clients.algorithm,
            "replying": availability.replying,
            "server-optimizer": server_optimizer,
            "reachable": availability.reachable,
            "schedule": availability.schedule and availability.schedule.code,
        }
        self.randomness = keyed_randomness(seed, plan, settings)
        plan.check_entropy(self.randomness.entropy)
        if isinstance(server_optimizer, Strategy):
            server_optimizer = FlowerOptimizer(server_optimizer)
        elif not isinstance(server_optimizer, FlowerOptimizer):
            # A copy, since momentum belongs to one run: the same object may be given to several,
            # and one with noise must not continue with the momentum of one without. A Flower
            # strategy remains the caller's, who may read its state.
            server_optimizer = copy.deepcopy(server_optimizer)
        self.server_optimizer = server_optimizer
        if not isinstance(ledger, Ledger):
            ledger = Ledger(
                in_existing_folder(ledger),
                delta=delta,
                max_epsilon=max_epsilon,
                declared_event=plan.event(),
                keeps="log" if self.randomness.entropy == "config" else "evidence",
                split={"population": plan.sampler.population or 0},
            )
        self.ledger = ledger
        self._accounting = Accounting(
            plan=plan,
            delta=delta,
            max_epsilon=max_epsilon,
            ledger=ledger,
            randomness=self.randomness,
        )
        # Where the cohort is secret, clients' budgets are not believed: stopping because one is
        # spent would reveal that its client was sampled.
        self._client_training = ClientTraining(charge=clients.charge) if plan.private else clients
        limit = availability.max_failed_rounds
        self._failures = Failures(None if self.protects else min(limit, plan.rounds or limit))
        keys = RecordKeys(weighted_by_key, arrayrecord_key, configrecord_key)
        counts = clients.counts(plan.sampler.population)
        self._aggregation_settings = AggregationSettings(plan, self.randomness, keys, counts)
        self.participants = Participants(
            plan, self.randomness, min_available_nodes, availability, private=self.protects
        )
        real = availability.real_time and fraction_evaluate is None
        fraction = metrics.fraction(0.0 if real else fraction_evaluate, protects=self.protects)
        in_flight = self._in_flight(availability, fraction)
        self.aggregation = _aggregation_of(plan, in_flight)
        evaluation: dict[str, Any] = {
            "participants": self.participants,
            "metrics": metrics,
            "keys": keys,
            "fraction": fraction,
            "aggregator": evaluate_metrics_aggr_fn,
        }
        self.evaluation = (
            ClientEvaluation(**evaluation)
            if metrics.private is None
            else PrivateEvaluation(**evaluation, rounds=self._accounting)
        )
        self.extras = _extras_of(
            plan,
            clients,
            server_optimizer,
            TrainMetrics(weighted_by_key, train_metrics_aggr_fn) if self.shows_clients else None,
            in_flight,
        )

    def _in_flight(
        self, availability: Availability, fraction_evaluate: float
    ) -> InFlight | Requests | None:
        """What a buffered cohort has in flight; None for another cohort."""
        sampler, schedule = self.plan.sampler, availability.schedule
        if not isinstance(sampler, Buffered):
            return None
        if not availability.real_time:
            assert schedule is not None  # by `check_buffered`
            return InFlight(schedule)
        if fraction_evaluate:
            raise FedsimError(
                f"fraction_evaluate is {fraction_evaluate:g}; with availability.real_time it must "
                "be 0.0 (evaluate.clients-every 0): an evaluation would wait for clients that "
                "train, and for those that do not answer."
            )
        nodes, replying = self.participants.nodes, availability.replying
        if schedule is not None:
            return ScheduledRequests(sampler, nodes, replying, schedule)
        patience = availability.node_timeout
        return ArrivingRequests(sampler, nodes, replying, self.randomness, patience)

    def privacy_statement(self) -> Statement:
        """What has been released so far, and what it cost."""
        statement = self.ledger.statement(self.delta)
        if self.private and isinstance(self.extras.get("in-flight"), Requests):
            statement = replace(statement, added_sentence=LATENESS)
        return statement if self.shows_clients else replace(statement, run=ReleaseSetting())

    def privacy_spent(self) -> PrivacySpent:
        """Epsilon and delta spent so far, in the form of Flower's own strategies."""
        return privacy_spent(self.ledger.cost(self.delta))

    def progress(self) -> list[str]:
        """Log lines about the round aggregated last: usable clients, and epsilon so far."""
        report = self.report
        if report is None:
            return []
        lines = [f"aggregate_train: {report}"]
        if self.private and not report.summed and self.stopped is None:
            lines.append(f"\t├──> {empty_sum(report.update_norm is not None)}")
        if self.private:
            lines.append(f"\t└──> {self._accounting.cost_text(self.rounds_done)}")
        return lines

    def summary(self) -> None:
        """Log the strategy's settings."""
        ledger_place = "in memory only" if self.ledger.path is None else str(self.ledger.path)
        for line in (
            f"Cohort: {self.plan.sampler}",
            f"Mechanism: {self.plan.mechanism}",
            f"Noise multiplier: {self.plan.noise.multiplier:g} ({self.randomness.entropy} entropy)",
            f"Ledger: {ledger_place}",
        ):
            self.log.info("\t├──> %s", line)


def _plan_of_keywords(
    plan: Plan | None,
    *,
    mechanism: Mechanism | None,
    cohort: Cohort | None,
    noise_multiplier: float | None,
    hardened_noise: bool | None,
    rounds: int | None,
    may_stop: bool | None,
    placement: Placement | None,
) -> Plan:
    """The given plan, or a plan built from the other keywords.

    Raises
    ------
    FedsimError
        If both are given, or if the keywords do not make a plan.
    """
    keywords = {
        "mechanism": mechanism,
        "cohort": cohort,
        "noise_multiplier": noise_multiplier,
        "hardened_noise": hardened_noise,
        "rounds": rounds,
        "may_stop": may_stop,
        "placement": placement,
    }
    if plan is not None:
        if doubled := [name for name, value in keywords.items() if value is not None]:
            raise FedsimError(
                f"{doubled[0]} is given together with plan=, which contains it; leave one of them "
                "out."
            )
        if plan.level != "client":
            raise FedsimError(
                f"plan.level is '{plan.level}'; a strategy's rows are clients: it must be 'client'."
            )
        return plan
    if mechanism is None or cohort is None:
        missing = {"mechanism": mechanism, "cohort": cohort, "noise_multiplier": noise_multiplier}
        names = [name for name, value in missing.items() if value is None]
        raise FedsimError(
            f"{' and '.join(names)} must be given; DPFedAvg takes mechanism=, cohort= and "
            "noise_multiplier=, or a ReleasePlan as plan=."
        )
    if noise_multiplier is None and mechanism.guarantee != "none":
        raise FedsimError(
            f"noise_multiplier is not given; with {type(mechanism).__name__} it must be a number "
            "above 0, or 0.0 to train without noise and without a guarantee."
        )
    hardened = True if hardened_noise is None else hardened_noise
    noise = Independent(noise_multiplier or 0.0, hardened)
    return ReleasePlan(
        level="client",
        sampler=cohort,
        mechanism=mechanism,
        noise=noise,
        rounds=rounds,
        may_stop=bool(may_stop),
        placement=placement or SERVER,
    )


_AGGREGATIONS: dict[type[Placement], Aggregation] = {
    Placement: ServerSum,
    NoiseShares: ClientShares,
    SecureAggregation: SecureSum,
}
"""The aggregation of a round, by who adds its noise."""


def _aggregation_of(plan: Plan, in_flight: InFlight | Requests | None) -> Aggregation:
    """The callable that creates the aggregation of each round."""
    if isinstance(in_flight, Requests):
        return partial(RealTimeSum, requests=in_flight)
    if in_flight is not None:
        return partial(BufferedSum, in_flight=in_flight)
    if isinstance(plan.mechanism, RobustMean):
        return RobustAggregation
    return _AGGREGATIONS[type(plan.placement)]


def _extras_of(
    plan: Plan,
    clients: ClientTraining,
    server_optimizer: ServerOptimizer,
    train_metrics: TrainMetrics | None,
    in_flight: InFlight | Requests | None,
) -> dict[str, Extra]:
    """The extras of a round, by name, in the order in which they are called."""
    extras: dict[str, Extra] = {} if in_flight is None else {"in-flight": in_flight}
    if train_metrics is not None:
        extras["metrics"] = train_metrics
    if isinstance(server_optimizer, FlowerOptimizer):
        # After the metrics, whose means it reads; before the extras that change config and vector.
        extras["strategy"] = StrategyConfig(server_optimizer)
    algorithm = clients.algorithm
    if algorithm is not None and algorithm.receives:
        # Last: it takes the vectors out of the mean, which then has the parameters' layout.
        expected = plan.denominator if plan.private else None
        extras["vectors"] = NamedVectors(algorithm, plan.sampler.population or 0, expected)
    return extras
