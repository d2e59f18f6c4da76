"""DP-FedAvg as a Flower strategy: draw a cohort, bound and sum its updates, add noise, step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid, PrivacySpent
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fedsim.clients import LocalAlgorithm
from fedsim.cohorts import Cohort
from fedsim.engines.arrays import array_record, tensors
from fedsim.errors import FedsimError
from fedsim.mechanisms import Mechanism, NoPrivacy, State
from fedsim.mechanisms.base import state_on
from fedsim.privacy import Ledger, Statement
from fedsim.privacy.flower_records import privacy_spent
from fedsim.privacy.plan import ReleasePlan
from fedsim.privacy.stopping import FIXED, Stopping
from fedsim.robust import RobustMean
from fedsim.rows import Layout
from fedsim.rows.exchange import RUN, Instructions
from fedsim.server_optimizers import ServerOptimizer, ServerSGD
from fedsim.strategies.accounting import Accounting, keyed
from fedsim.strategies.bound_state import BoundState
from fedsim.strategies.client_budgets import ClientBudget, ClientBudgets
from fedsim.strategies.client_evaluation import ClientEvaluation
from fedsim.strategies.client_state import ClientState
from fedsim.strategies.contributions import Asked, Contributions, Placement
from fedsim.strategies.flower_optimizer import FlowerOptimizer
from fedsim.strategies.kept_rows import KeptRows
from fedsim.strategies.loop import ResumableStrategy
from fedsim.strategies.outcome import NOISE_ALONE, Failures, RoundReport
from fedsim.strategies.participants import Participants, Replying
from fedsim.strategies.refusals import (
    allowed_fraction,
    declared_counts,
    plan_of_keywords,
    refuse_flowers_keywords,
    refuse_noise,
    refuse_running_statistics,
    refuse_too_many,
    refuse_unplain_means,
    refuse_void_settings,
)
from fedsim.strategies.replies import to_arrays
from fedsim.strategies.state import Tree
from fedsim.strategies.summaries import MetricMeans, MetricsAggregator
from fedsim.strategies.vectors import NamedVectors

__all__ = ["DPFedAvg"]


class DPFedAvg(ResumableStrategy):
    """Federated averaging with client-level differential privacy (Das et al., Algorithm 1).

    The guarantee covers the sequence of global models. It holds under any loop that calls
    `configure_train` and `aggregate_train` in turn: the cohort is drawn and the budget
    checked in the first; the second writes the release to the ledger before it is made.

    A private round whose cohort was drawn is always released and charged, whoever fails: if
    nobody asked was usable, the release is noise alone, and still a step. Failures are counted
    and never end a private run, since clients may fail because of their data. Only where no
    node can be reached at all is there no round.

    Parameters
    ----------
    plan : ReleasePlan, optional
        What every round releases: cohort, mechanism and noise in one value. The next three
        keywords, and ``hardened_noise``, make one where it is not given.
    mechanism : Mechanism
        Bounds, sums and noises the updates. `NoPrivacy("uniform")` makes this FedAvg.
    cohort : Cohort
        Who takes part. Its population is declared, and the mean's denominator follows from
        it, never from who replied.
    noise_multiplier : float
        Standard deviation of the noise on the sum, as a multiple of the bound; 0.0 for none. It
        must be given, but with a mechanism that protects nobody.
    delta : float
        Where epsilon is reported.
    max_epsilon : float, optional
        Budget: no release is made that would exceed it.
    stopping : Stopping
        Whether what is released may end the run before its planned rounds are made: the budget
        then holds at half of delta.
    ledger : Ledger or path, optional
        Where releases are written down; in memory by default.
    seed : int, optional
        Keys the cohorts, the noise and the evaluation samples. By default they come from the
        operating system, as they must wherever the guarantee is meant in earnest.
    release : str, optional
        Digest of all that determines what is released, which keys the noise beside the seed, so
        that two runs of one seed share none. By default it is of the settings given here; then
        runs whose clients do other work must have other seeds.
    server_optimizer : ServerOptimizer or Flower Strategy, optional
        Applied to the noisy mean; by default it is added as it is. Of Flower's strategies,
        those that refine FedAvg's mean will do: `FedAdam`, `FedYogi`, `FedAvgM`, ...
    placement : "server" or "client"
        Where noise is drawn: once on the sum, or in the shares of the clients asked, each of
        variance ``z^2 C^2 / asked`` (with full participation, Das et al.'s own form), while
        the server adds what missing clients would have. The total is the same.
    hardened_noise : bool
        See `NoiseSource`.
    fraction_evaluate : float, optional
        Share of the clients that evaluate the model. Their metrics are released without
        noise, so a private run needs ``unprotected_metrics=True`` for it, and defaults to 0.
    evaluate_every : int
        Rounds from one evaluation by clients to the next.
    replying : callable ``(round, client ids [n]) -> bool [n]``, optional
        Who of those that were drawn takes part, by a trace or a model of devices. It must not
        depend on data: who does not take part counts as missing.
    reachable : callable ``(round, client ids [n]) -> bool [n]``, optional
        Who of those that are to evaluate is there for it, in the same way.
    min_available_nodes : int
        Clients to wait for before a round, for at most ``node_timeout`` seconds; in a private
        run before the first round only.
    max_failed_rounds : int
        So many rounds in a row without a single usable reply fail a run without privacy.
    algorithm : LocalAlgorithm, optional
        What clients run, if it sends named vectors beside its updates (SCAFFOLD's control
        variates): it says what becomes of them here.
    average_client_state : bool
        Whether clients start from the mean of the state (ADADP's rate) that the last round's
        ended with, which they report: their ``client.state = "server"``.
    evaluate_quantiles : bool
        Whether clients' evaluations are shown as quantiles over clients too, and not as means only.
    unprotected_metrics : bool
        Whether clients' metrics may be aggregated, without noise, in a private run.
    private_examples : bool
        Whether clients protect their own examples (example-level privacy). What they report,
        and how they fail, is then treated as in a private run, whatever the mechanism here.
    example_counts : sequence of int, optional
        Each client's number of examples, declared public: they weigh the updates in place of what
        clients report. Clients with private examples are weighed by nothing else.
    client_budget : callable ``(vector [d], client ids, round) -> sentence or None``, optional
        Asked before clients are: a sentence says why their own budgets do not allow the round,
        and stops the run. Not where the run is private at client level: it would show who was
        drawn.
    budgets_end_run : bool
        Whether one client that says that its own budget is spent ends a run that is not private at
        client level, as is right where all clients are of one machine. By default it is left
        out alone, because a stranger may say so; all of several who were asked end the run.
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

    def __init__(
        self,
        *,
        plan: ReleasePlan[Mechanism] | None = None,
        mechanism: Mechanism | None = None,
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
        hardened_noise: bool | None = None,
        fraction_evaluate: float | None = None,
        evaluate_every: int = 1,
        replying: Replying | None = None,
        reachable: Replying | None = None,
        min_available_nodes: int = 1,
        node_timeout: float = 60.0,
        max_failed_rounds: int = 3,
        algorithm: LocalAlgorithm | None = None,
        average_client_state: bool = False,
        evaluate_quantiles: bool = False,
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
        refuse_flowers_keywords(flowers)
        self.plan = plan_of_keywords(plan, mechanism, cohort, noise_multiplier, hardened_noise)
        """What every round releases, and what that costs."""
        mechanism, cohort = self.plan.bound, self.plan.sampler
        robust = mechanism if isinstance(mechanism, RobustMean) else None
        if robust is not None:
            refuse_noise(robust, self.plan.noise.multiplier)
            robust.check(cohort.expected_size)
        self.private = self.plan.private
        self.protects = self.private or private_examples
        """Whether the run claims privacy at either level."""
        refuse_void_settings(mechanism, max_epsilon, private_examples, example_counts)
        shows_clients = not self.protects or unprotected_metrics
        fraction_evaluate = allowed_fraction(fraction_evaluate, shows_clients)
        self._robust = robust
        # What may enter a robust mean is what may enter a mean.
        self.mechanism = NoPrivacy("uniform") if robust is not None else mechanism
        self.cohort = cohort
        self.delta = delta
        self.max_epsilon = max_epsilon
        if not isinstance(ledger, Ledger):
            ledger = Ledger(
                ledger, delta=delta, max_epsilon=max_epsilon, declared=self.plan.event()
            )
        self.ledger = ledger
        server_optimizer = server_optimizer or ServerSGD()
        others = {
            "algorithm": algorithm, "replying": replying, "server-optimizer": server_optimizer,
        }  # fmt: skip
        self.randomness = keyed(seed, release, self.plan, placement, others)
        if isinstance(server_optimizer, Strategy):
            server_optimizer = FlowerOptimizer(server_optimizer)
        self.server_optimizer = server_optimizer
        self.placement = placement
        self._accounting = Accounting(
            self.plan,
            delta,
            max_epsilon,
            stopping,
            ledger,
            release,
            placement,
            self.randomness,
        )
        self.replying = replying
        # A client's budget follows from public numbers only where nobody's cohort is secret.
        self._budgets = ClientBudgets(
            ask=None if self.private else client_budget,
            one_ends_run=budgets_end_run,
            heard=self.protects and not self.private,
        )
        self.shows_clients = shows_clients
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn

        self.client_state = ClientState(self.private, placement) if average_client_state else None
        """What clients have in common besides the model, if they do."""
        self._vectors = NamedVectors(algorithm, self.plan.sampler.population or 0, self.protects)
        refuse_unplain_means(algorithm, mechanism)
        self.stopped: str | None = None
        """Why no further release will be made, once that is so."""
        self.report: RoundReport | None = None
        """What happened in the round aggregated last."""
        self.result: Result | None = None
        """What `start` has reached, also after an exception."""
        self._contributions = Contributions(
            replace(self.plan, bound=self.mechanism),
            placement,
            self.randomness,
            weighted_by_key,
            arrayrecord_key,
            declared_counts(example_counts, cohort),
            needs_rows=robust is not None,
        )
        self._participants = Participants(
            cohort,
            self.randomness,
            min_available_nodes,
            node_timeout,
            private=self.protects,
            amplified=self.plan.amplified,
        )
        self._evaluation = ClientEvaluation(
            self._participants,
            fraction_evaluate,
            evaluate_every,
            weighted_by_key,
            arrayrecord_key,
            configrecord_key,
            evaluate_metrics_aggr_fn,
            evaluate_quantiles,
            reachable,
        )
        self.rounds_done = 0
        self._bound = BoundState(self.mechanism)
        self._asked: Asked | None = None
        self._failures = Failures(None if self.protects else max_failed_rounds)

    # -- training ---------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort; nobody is asked once the budget does not allow a release.

        Raises
        ------
        ValueError
            If the round, or a later one, was aggregated before: its draws would be used twice.
        """
        if server_round <= self.rounds_done:
            raise ValueError(
                f"round {server_round} cannot follow round {self.rounds_done}: its noise and "
                "cohort would be drawn twice; a run of its own needs a strategy of its own."
            )
        self._asked = None
        if self.stopped is not None or self._stops(self._accounting.stops(server_round)):
            return []
        server = tensors(arrays)
        layout = self._take_layout(server)
        vector, arrays = self._vectors.extended(Layout.of(server).flatten(server), arrays, layout)
        drawn = self._participants.drawn(server_round, grid, self.replying)
        present = drawn.client_ids
        if self._stops(self._budgets.exceeded(vector, present, server_round)):
            return []
        self._asked = Asked(
            round=server_round,
            absent=drawn.absent,
            client_ids=present,
            client_of=dict(zip(drawn.node_ids.tolist(), present.tolist(), strict=True)),
            server=server,
            vector=vector,
        )
        entries, records = self._contributions.request(len(present), self._bound.values, layout)
        if self.client_state is not None:
            entries |= self.client_state.entries()
        if self.protects:
            entries[RUN] = self.ledger.run
        if isinstance(self.server_optimizer, FlowerOptimizer):
            config = self.server_optimizer.told(vector[: layout.d], config)
        return Instructions(
            message_type="train",
            round=server_round,
            arrays=arrays,
            vector=vector,
            client_ids=present,
            node_ids=drawn.node_ids,
            config=ConfigRecord({**config, **entries, "server-round": server_round}),
            arrayrecord_key=self.arrayrecord_key,
            configrecord_key=self.configrecord_key,
            records=records,
            numbers=self._contributions.declared(present),
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Bound and sum the updates, write the release down, make it, and step.

        Returns
        -------
        tuple
            New parameters, None if no release was made, as where a client's own budget does not
            allow one and the run stops; and the training metrics, None in a private run without
            ``unprotected_metrics``.

        Raises
        ------
        RunFailedError
            After ``max_failed_rounds`` rounds in a row without a usable reply, in a run
            without privacy.
        ValueError
            If this round was not configured, or has been aggregated before.
        """
        if self.stopped is not None:
            return None, None
        asked, self._asked = self._asked, None
        layout = self._bound.layout
        if asked is None or asked.round != server_round or layout is None:
            raise ValueError(f"round {server_round} was not configured, or is aggregated already.")
        self.rounds_done = server_round
        means = MetricMeans(self.weighted_by_key, self.train_metrics_aggr_fn)
        rows = None if self._robust is None else KeptRows(self._robust)
        gathered = self._contributions.summed(asked, replies, layout, self._bound.values)
        for reply, usable in gathered:
            if rows is not None:
                rows.take(reply.block, usable)
            if self.client_state is not None:
                self.client_state.take(reply.block, usable)
            if self.shows_clients:
                means.add(reply)
        self.report = replace(
            gathered.tally.report(server_round), ignored=self._participants.ignored
        )
        if self._stops(self._budgets.spent(self.report)):
            self.rounds_done = server_round - 1  # this round is not made
            return None, None
        # On disk before the release exists: a crash from here on counts one too many.
        clip_norm = self.mechanism.sensitivity(self._bound.values, layout)
        summed = self._contributions.content(gathered) if self.protects else None
        if self._stops(self._accounting.record(server_round, clip_norm, summed)):
            self.rounds_done = server_round - 1
            return None, None
        lost = len(asked.client_of) > 0 and gathered.total.count == 0
        self._failures.note(self.report, lost)
        # Whether noise is released must not depend on whether anybody failed.
        if lost and not self.private:
            return None, None
        if self.client_state is not None:
            self.client_state.average()
        release = self._contributions.release(gathered)
        if rows is not None and gathered.total.count:
            release = replace(release, mean=rows.center())
        self._bound.values = state_on(release.state, asked.vector.device)
        update = self._vectors.combine(
            release.mean.to(asked.vector.device), asked.vector, layout, gathered.total.count
        )
        metrics = means.record()
        if isinstance(self.server_optimizer, FlowerOptimizer):
            self.server_optimizer.metrics = metrics
        vector = self.server_optimizer.step(asked.vector[: len(update)], update)
        norm = float(update.norm())
        sides = {name: float(mean) for name, mean in release.sides.items()}
        self.report = replace(self.report, info={**release.info, **sides}, update_norm=norm)
        arrays = array_record(to_arrays(vector, Layout.of(asked.server), asked.server))
        return arrays, metrics

    def _stops(self, why: str | None) -> bool:
        """Make no further release, if there is a reason."""
        if why is not None:
            self.stopped = why
            self.log.warning("stopping: %s.", why)
        return why is not None

    def check(self, arrays: ArrayRecord) -> None:
        """Refuse now what the first round would refuse.

        Parameters
        ----------
        arrays : ArrayRecord
            The initial parameters.

        Raises
        ------
        FedsimError
            If the mechanism, the placement of its noise or the budget does not fit the model.
        """
        layout = self._take_layout(tensors(arrays))
        self.mechanism.sensitivity(self._bound.values, layout)
        if self.placement == "client" and self.mechanism.guarantee == "none":
            raise FedsimError(
                f"placement = 'client' (noise.placement); it must be 'server' with "
                f"{self.mechanism}, which has no noise that clients could share."
            )
        self._accounting.check()

    def _take_layout(self, server: dict[str, Tensor]) -> Layout:
        layout = self._vectors.row_layout(Layout.of(server))
        if self._bound.layout is None:
            if self.private:
                refuse_running_statistics(server)
            self._bound.begin(layout, next(iter(server.values())).device)
            # Refuses a split of the noise that does not exist before anybody is asked.
            releaser = self._contributions.releaser(layout)
            refuse_too_many(self.cohort, releaser.most_rows)
        elif layout != self._bound.layout:
            raise FedsimError("the model's parameters changed their names or shapes in the run.")
        return layout

    # -- privacy ----------------------------------------------------------------------

    def privacy_statement(self) -> Statement:
        """What has been released so far, and what it cost."""
        stopping = self._accounting.stopping.after(self.rounds_done)
        return self.ledger.statement(self.delta, stopping=stopping)

    def privacy_spent(self) -> PrivacySpent:
        """The same, as Flower's own strategies report it."""
        return privacy_spent(self._accounting.cost(self.rounds_done))

    # -- state ------------------------------------------------------------------------

    @property
    def mechanism_state(self) -> State:
        """The mechanism's state after the round aggregated last, as public as the releases."""
        return dict(self._bound.values)

    def state(self) -> Tree:
        """Everything but the parameters that outlives a round; see `restore`.

        Returns
        -------
        mapping of str to tensors, what JSON can say, and such mappings
            ``round``, the last one aggregated; ``cohort`` (what the sampler remembers),
            ``mechanism``, ``optimizer``, ``clients`` (the means of what they ended with),
            ``vectors`` (what they are sent beside the parameters), ``failures``, ``stopped``, and
            ``ledger``: where it stands, and its lines if it is in memory only.
        """
        return {
            "round": self.rounds_done,
            **self._bound.state(),
            "cohort": self._participants.state(),
            "optimizer": self.server_optimizer.state(),
            "clients": {} if self.client_state is None else dict(self.client_state.values),
            "vectors": None if self._vectors.values is None else self._vectors.values.clone(),
            "failures": self._failures.state(),
            "stopped": self.stopped,
            "ledger": self._accounting.state(),
        }

    def restore(self, state: Tree) -> None:
        """Go on from what `state` gave, in a strategy that was made with the same settings.

        Raises
        ------
        FedsimError
            If this strategy has done rounds of its own, or its ledger does not hold the
            releases that the state counts.
        """
        if self.rounds_done:
            raise FedsimError(
                f"this strategy has done {self.rounds_done} rounds; state= needs a new strategy."
            )
        self._accounting.restore(state["ledger"])
        self._participants.restore(state["cohort"])
        self._bound.restore(state)
        self.rounds_done = state["round"]
        self.server_optimizer.restore(state["optimizer"])
        if self.client_state is not None:
            self.client_state.values = dict(state["clients"])
        self._vectors.values = state["vectors"]
        self._failures.restore(state["failures"])
        self.stopped = state["stopped"]

    # -- evaluation by clients --------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask a keyed sample of the clients to evaluate the model."""
        return self._evaluation.configure(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Weighted mean of the metrics; None if nobody was asked or nobody answered."""
        return self._evaluation.aggregate(replies)

    # -- the run ----------------------------------------------------------------------

    def progress(self) -> list[str]:
        """Lines about the round that was aggregated last: who was usable, and epsilon."""
        report = self.report
        if report is None:
            return []
        lines = [f"aggregate_train: {report}"]
        if self.private and not report.usable:
            lines.append(f"\t├──> {NOISE_ALONE}")
        if self.private:
            lines.append(f"\t└──> {self._accounting.spent(self.rounds_done)}")
        return lines

    def summary(self) -> None:
        """Log the strategy's settings."""
        where = "in memory only" if self.ledger.path is None else str(self.ledger.path)
        for line in (
            f"Cohort: {self.cohort}",
            f"Mechanism: {self.mechanism}",
            f"Noise multiplier: {self.plan.noise.multiplier:g} ({self.randomness.entropy} entropy)",
            f"Ledger: {where}",
        ):
            self.log.info("\t├──> %s", line)
