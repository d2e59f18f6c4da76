"""DP-FedAvg as a Flower strategy: its keywords, what they make of the rounds, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, cast

from flwr.serverapp import PrivacySpent
from flwr.serverapp.strategy import Strategy

from fedsim.arguments import check_arguments
from fedsim.clients import LocalAlgorithm
from fedsim.cohorts import Cohort
from fedsim.federation.accounting import (
    Accounting,
    ClientBudget,
    ClientBudgets,
    Placement,
    keyed,
)
from fedsim.federation.aggregation.robust import RobustMean
from fedsim.federation.aggregation.secagg.server import SecureSum
from fedsim.federation.aggregation.secagg.threshold import SecureAggregation
from fedsim.federation.aggregation.server_sum import (
    AggregationSettings,
    PendingRound,
    RobustAggregation,
    ServerSum,
)
from fedsim.federation.aggregation.share_sums import ClientShares
from fedsim.federation.client_metrics import (
    MetricsAggregator,
    OpenEvaluation,
    TrainMetrics,
)
from fedsim.federation.extras import Extra, NamedVectors, SharedClientState
from fedsim.federation.optimizers import FlowerOptimizer, StrategyConfig
from fedsim.federation.participants import Participants, Replying
from fedsim.federation.private_metrics import PrivateEvaluation, PrivateMetrics
from fedsim.federation.private_rounds import PrivateRounds
from fedsim.federation.replies import RecordKeys
from fedsim.federation.round_report import Failures, empty_sum
from fedsim.federation.strategy_checks import (
    allowed_alternation,
    allowed_fraction,
    declared_counts,
    plan_of_keywords,
    refuse_client_state,
    refuse_flowers_keywords,
    refuse_private_metrics,
    refuse_vectors_of,
    refuse_void_settings,
)
from fedsim.mechanisms import Mechanism, NoPrivacy
from fedsim.privacy import Ledger, Statement
from fedsim.privacy.claims import FIXED, Stopping
from fedsim.privacy.flower_records import privacy_spent
from fedsim.privacy.plan import ReleasePlan
from fedsim.rows.alternation import Alternation
from fedsim.server_optimizers import ServerOptimizer, ServerSGD


class DPFedAvg(PrivateRounds):
    """Federated averaging with client-level differential privacy (Das et al., Algorithm 1).

    The guarantee covers the sequence of global models. It holds under any loop that calls
    `configure_train` and `aggregate_train` in turn: the cohort is drawn and the budget
    checked in the first; the second writes the release to the ledger before it is made.

    A private round whose cohort was drawn is always released and charged, however many clients
    fail: if none was usable, the release is noise alone, and still a step. Failures are counted
    and never end a private run, since clients may fail because of their data. A round is lost only
    if no node can be reached at all, or if fewer clients than ``secure.threshold`` remain.

    Parameters
    ----------
    plan : ReleasePlan, optional
        What every round releases: cohort, mechanism and noise in one value. Without it the next
        three keywords, and ``hardened_noise``, make one.
    mechanism : Mechanism or RobustMean
        Bounds, sums and noises the updates. `NoPrivacy("uniform")` makes this FedAvg; a robust mean
        (`Krum`, `Median`, `TrimmedMean`), without privacy, takes the place of the sum.
    cohort : Cohort
        Samples the clients of a round. Its population is declared, and the mean's denominator
        follows from it, never from the number of replies.
    noise_multiplier : float
        Standard deviation of the noise on the sum, as a multiple of the bound; 0.0 for none. It
        must be given, unless the mechanism gives no guarantee.
    delta : float
        Where epsilon is reported.
    max_epsilon : float, optional
        Budget: no release is made that would exceed it.
    stopping : Stopping
        Whether released values may end the run before its planned rounds: the budget then holds at
        half of delta.
    ledger : Ledger or path, optional
        Records releases; in memory by default.
    seed : int, optional
        Keys the cohorts, the noise and the evaluation samples. By default they come from the
        operating system, as they must wherever the guarantee has to hold outside a simulation.
    release : str, optional
        Digest of all that determines what is released, which keys the noise beside the seed, so
        that two runs of one seed share none. By default it is of the settings given here; then
        runs whose clients do other work must have other seeds.
    server_optimizer : ServerOptimizer or Flower Strategy, optional
        Applied to the noisy mean; by default it is added unchanged. Of Flower's strategies,
        those that refine FedAvg's mean will do: `FedAdam`, `FedYogi`, `FedAvgM`, ...
    placement : "server" or "client"
        Where noise is drawn: once on the sum, or in the shares of the n sampled clients, each of
        variance ``z^2 C^2 / n`` (with full participation, Das et al.'s own form), while the
        server adds the noise of missing clients. The total is the same.
    secure : SecureAggregation, optional
        Sum shares under masks, so that the server sees none; with ``placement="client"``. Each
        share then has so much noise that the fewest honest clients of a sum contribute all of it.
        Clients that train in this process add the same shares without masks.
    hardened_noise : bool
        Whether noise is drawn so that floating-point artefacts do not show the sum
        (`NoiseSource`).
    fraction_evaluate : float, optional
        Share of the clients that evaluate the model. Their metrics are released without
        noise, so a private run needs ``unprotected_metrics=True`` for it, and defaults to 0.
    evaluate_every : int
        Rounds from one evaluation by clients to the next.
    replying : callable ``(round, client ids [n]) -> bool [n]``, optional
        Which of the sampled clients take part, by a trace or a model of devices. It must not
        depend on data: the others count as missing.
    reachable : callable ``(round, client ids [n]) -> bool [n]``, optional
        Which of the clients that are to evaluate can be reached, in the same way.
    min_available_nodes : int
        Clients to wait for before a round, for at most ``node_timeout`` seconds; in a private
        run before the first round only.
    max_failed_rounds : int
        So many rounds in a row without a usable reply fail a run without privacy, or all of its
        rounds if there are fewer.
    algorithm : LocalAlgorithm, optional
        The clients' algorithm, if it sends or receives named vectors besides updates (SCAFFOLD's
        control variates), which it combines on the server.
    alternation : Alternation, optional
        Parameters that clients train in turns (an `AlternatingTrainer`): what rests in a round has
        zeros in all rows, and stays as it is whatever the release and the optimiser say there.
    average_client_state : bool
        Whether clients report their state (ADADP's rate) and start from the mean of the last
        round's: ``client.state = "server"``.
    evaluate_quantiles : bool
        Whether quantiles over clients are shown besides the means of their evaluations.
    private_metrics : PrivateMetrics, optional
        Release clients' evaluations with noise: each is one more release of a private run, in the
        same ledger and budget. ``fraction_evaluate`` is then the rate at which clients are sampled
        for it; 1 by default.
    unprotected_metrics : bool
        Whether clients' metrics may be aggregated, without noise, in a private run.
    private_examples : bool
        Whether clients protect their own examples (example-level privacy). Their reports and
        failures are then treated as in a private run, whatever the mechanism.
    example_counts : sequence of int, optional
        Each client's number of examples, declared public: updates are weighed by it, not by what
        clients report. Updates of clients with private examples have no other weights.
    client_budget : callable ``(vector [d], client ids, round) -> sentence or None``, optional
        Called before messages are sent: a sentence says why clients' own budgets do not allow the
        round, and stops the run. Not called if the run is private at client level, where stopping
        would reveal the cohort.
    budgets_end_run : bool
        Whether one client whose own budget is spent ends a run that is not private at client level,
        as is right if all clients are on one machine. By default, since a stranger may claim so,
        that client alone is left out, and the run ends only if all of several clients report it.
    weighted_by_key, arrayrecord_key, configrecord_key, train_metrics_aggr_fn, \
evaluate_metrics_aggr_fn
        As for Flower's `FedAvg`. ``weighted_by_key`` weighs metrics, and updates only under
        ``NoPrivacy(weighting="num-examples")``.
    **flowers
        Other keywords of Flower's strategies are refused with the one to use here.

    Raises
    ------
    FedsimError
        If a setting is impossible or would void the guarantee.
    """

    @check_arguments
    def __init__(
        self,
        *,
        plan: ReleasePlan[Mechanism | RobustMean] | None = None,
        mechanism: Mechanism | RobustMean | None = None,
        cohort: Cohort | None = None,
        noise_multiplier: float | None = None,
        delta: float = 1e-5,
        max_epsilon: float | None = None,
        stopping: Stopping = FIXED,
        ledger: Ledger | str | PathLike[str] | None = None,
        seed: int | None = None,
        release: str | None = None,
        server_optimizer: ServerOptimizer | Strategy | None = None,
        placement: Placement = "server",
        secure: SecureAggregation | None = None,
        hardened_noise: bool | None = None,
        fraction_evaluate: float | None = None,
        evaluate_every: int = 1,
        replying: Replying | None = None,
        reachable: Replying | None = None,
        min_available_nodes: int = 1,
        node_timeout: float = 180.0,
        max_failed_rounds: int = 3,
        algorithm: LocalAlgorithm | None = None,
        alternation: Alternation | None = None,
        average_client_state: bool = False,
        evaluate_quantiles: bool = False,
        private_metrics: PrivateMetrics | None = None,
        unprotected_metrics: bool = False,
        private_examples: bool = False,
        example_counts: Sequence[int] | None = None,
        client_budget: ClientBudget | None = None,
        budgets_end_run: bool = False,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsAggregator | None = None,
        evaluate_metrics_aggr_fn: MetricsAggregator | None = None,
        **flowers: object,
    ) -> None:
        super().__init__()
        refuse_flowers_keywords(flowers)
        plan = plan_of_keywords(plan, mechanism, cohort, noise_multiplier, hardened_noise)
        self.plan, self.private = plan, plan.private
        self.delta, self.placement, self.secure = delta, placement, secure
        self.protects = plan.private or private_examples
        self.shows_clients = not self.protects or unprotected_metrics
        refuse_void_settings(plan, max_epsilon, private_examples, example_counts)
        if average_client_state:
            refuse_client_state(plan.private, placement)
        refuse_private_metrics(
            private_metrics, plan, placement, private_examples, evaluate_metrics_aggr_fn
        )
        fraction = allowed_fraction(
            fraction_evaluate, self.shows_clients or private_metrics is not None
        )
        if secure is not None:
            secure.check(plan, placement, unprotected_metrics)
        summed, self.aggregation = _aggregation_of(plan, placement, secure)
        self.mechanism = summed.bound
        refuse_vectors_of(algorithm, plan.bound, self.protects)

        server_optimizer = server_optimizer or ServerSGD()
        others = {
            "algorithm": algorithm, "replying": replying, "server-optimizer": server_optimizer,
            "secure": secure, "alternation": alternation,
        }  # fmt: skip
        self.randomness = keyed(seed, release, plan, placement, others)
        if isinstance(server_optimizer, Strategy):
            server_optimizer = FlowerOptimizer(server_optimizer)
        self.server_optimizer = server_optimizer
        self.alternation = allowed_alternation(alternation, plan, algorithm)
        if not isinstance(ledger, Ledger):
            ledger = Ledger(ledger, delta=delta, max_epsilon=max_epsilon, declared=plan.event())
        self.ledger = ledger
        self._accounting = Accounting(
            plan,
            delta,
            max_epsilon,
            stopping,
            ledger,
            release,
            placement,
            self.randomness,
            {} if secure is None else secure.public,
        )
        # Which clients' budgets are spent shows who was drawn, so not where the cohort is secret.
        self._budgets = ClientBudgets(
            ask=None if plan.private else client_budget,
            one_ends_run=budgets_end_run,
            believed=self.protects and not plan.private,
        )
        most = min(max_failed_rounds, plan.rounds or max_failed_rounds)  # all of a short run's
        self._failures = Failures(None if self.protects else most)
        keys = RecordKeys(weighted_by_key, arrayrecord_key, configrecord_key)
        self._aggregation_settings = AggregationSettings(
            summed, self.randomness, keys, declared_counts(example_counts, plan.sampler)
        )
        self.participants = Participants(
            plan,
            self.randomness,
            min_available_nodes,
            node_timeout,
            replying=replying,
            private=self.protects,
        )
        evaluators: dict[str, Any] = {
            "participants": self.participants, "fraction": fraction, "every": evaluate_every,
            "reachable": reachable, "keys": keys,
        }  # fmt: skip
        self.evaluation = (
            OpenEvaluation(
                **evaluators, aggregator=evaluate_metrics_aggr_fn, quantiles=evaluate_quantiles
            )
            if private_metrics is None
            else PrivateEvaluation(**evaluators, metrics=private_metrics, rounds=self._accounting)
        )
        extras: dict[str, Extra | None] = {
            "metrics": TrainMetrics(weighted_by_key, train_metrics_aggr_fn)
            if self.shows_clients
            else None,
            # It sees the caller's config entries, the means above and the parameters alone.
            "strategy": StrategyConfig(server_optimizer)
            if isinstance(server_optimizer, FlowerOptimizer)
            else None,
            "clients": SharedClientState() if average_client_state else None,
            # Last: it takes the vectors out of the mean, which then has the parameters' layout.
            "vectors": NamedVectors(
                algorithm,
                plan.sampler.population or 0,
                plan.denominator if plan.private else None,
            )
            if algorithm is not None and algorithm.receives
            else None,
        }
        self.extras = {name: extra for name, extra in extras.items() if extra is not None}

    def privacy_statement(self) -> Statement:
        """What has been released so far, and what it cost."""
        stopping = self._accounting.stopping.after(self.rounds_done)
        return self.ledger.statement(self.delta, stopping=stopping)

    def privacy_spent(self) -> PrivacySpent:
        """The same, as Flower's own strategies report it."""
        return privacy_spent(self._accounting.cost(self.rounds_done))

    def progress(self) -> list[str]:
        """Lines about the round that was aggregated last: who was usable, and epsilon."""
        report = self.report
        if report is None:
            return []
        lines = [f"aggregate_train: {report}"]
        if self.private and not report.summed and self.stopped is None:
            lines.append(f"\t├──> {empty_sum(report.update_norm is not None)}")
        if self.private:
            lines.append(f"\t└──> {self._accounting.spent(self.rounds_done)}")
        return lines

    def summary(self) -> None:
        """Log the strategy's settings."""
        where = "in memory only" if self.ledger.path is None else str(self.ledger.path)
        for line in (
            f"Cohort: {self.plan.sampler}",
            f"Mechanism: {self.plan.bound}",
            f"Noise multiplier: {self.plan.noise.multiplier:g} ({self.randomness.entropy} entropy)",
            f"Ledger: {where}",
        ):
            self.log.info("\t├──> %s", line)


def _aggregation_of(
    plan: ReleasePlan[Mechanism | RobustMean],
    placement: Placement,
    secure: SecureAggregation | None,
) -> tuple[ReleasePlan[Mechanism], Callable[[AggregationSettings, PendingRound], ServerSum]]:
    """The plan of a round's sum, and what makes the round's aggregation."""
    bound = plan.bound
    if isinstance(bound, RobustMean):
        bound.check(plan.sampler.expected_size)
        aggregation = partial(RobustAggregation, bound)
        return cast(Any, replace(plan, bound=NoPrivacy("uniform"))), aggregation
    if secure is not None:
        return cast(Any, plan), partial(SecureSum, secure)
    return cast(Any, plan), ClientShares if placement == "client" else ServerSum
