"""Metrics that clients report: from training, and from evaluating the global model."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedsim.errors import BudgetSpentError, keep_user_frames, printable
from fedsim.federation.accounting import Accounting
from fedsim.federation.arrays import tensors
from fedsim.federation.client_settings import ClientMetrics
from fedsim.federation.exchange import (
    Instructions,
    Recipients,
    RecordKeys,
    Replies,
    metric_record,
)
from fedsim.federation.extras import LARGEST, Extra, RoundResult
from fedsim.federation.participants import Participants
from fedsim.federation.replies import Reply, read_replies
from fedsim.federation.round_report import Tally
from fedsim.rows import Layout

QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}
"""Names and levels of the quantiles over clients that have examples, unweighted."""

_log = logging.getLogger("fedsim")

Value = TypeVar("Value")
MetricsAggregator = Callable[[list[RecordDict], str], MetricRecord]
"""Like Flower's ``train_metrics_aggr_fn``: maps one record a client to the aggregate."""


class MetricMeans:
    """Weighted means of metrics over clients; the number of examples itself is summed.

    A number is averaged over the clients that report it; a list is averaged entry by entry, over
    the clients whose lists have the most frequent length. Numbers that are not finite are left out
    and counted.

    Parameters
    ----------
    weighted_by_key : str
        Metric that weights the others; clients without it have weight 1.
    aggregate : callable, optional
        A user's own aggregation, in Flower's form, used instead: it gets each client's record, in
        the order of the client ids.
    quantiles : bool
        Whether `QUANTILES` of each metric are shown in addition to its mean, as ``accuracy-p10``.

    Attributes
    ----------
    left_out : mapping of str to int
        By metric, how many numbers were not finite or beyond 1e100.
    by_client : mapping of int to mapping of str to float
        What each client has reported, numbers only, whether it is in the means or not.
    """

    def __init__(
        self,
        weighted_by_key: str,
        aggregate: MetricsAggregator | None = None,
        *,
        quantiles: bool = False,
    ) -> None:
        self.left_out: Counter[str] = Counter()
        self.by_client: dict[int, dict[str, float]] = {}
        self._quantiles = quantiles
        self._key = weighted_by_key
        self._aggregate = aggregate
        self._records: dict[int, RecordDict] = {}
        self._reports: dict[str, list[tuple[float, float]]] = {}
        self._lists: dict[str, list[tuple[float, list[float]]]] = {}

    def add(self, reply: Reply) -> None:
        """Add the metrics of a reply's clients, none of which has failed."""
        client_ids = reply.block.client_ids.tolist()
        metrics = {k: v.tolist() for k, v in reply.block.metrics.items()}
        for row, client_id in enumerate(client_ids):
            self.by_client[client_id] = {name: values[row] for name, values in metrics.items()}
        if self._aggregate is not None:
            self._records |= zip(client_ids, _records(reply), strict=True)
            return
        weights = metrics.get(self._key, [1.0] * len(client_ids))
        for name, values in metrics.items():
            self._add_reports(name, weights, values)
        for name, entries in reply.lists.items() if weights else ():
            self._lists.setdefault(name, []).append((weights[0], entries))

    def _add_reports(self, name: str, weights: Sequence[float], values: Sequence[float]) -> None:
        reports = self._reports.setdefault(name, [])
        for weight, value in zip(weights, values, strict=True):
            if abs(value) <= LARGEST:
                reports.append((weight, value))
            else:
                self.left_out[name] += 1

    def record(self) -> MetricRecord | None:
        """The means; None if no client reported, or if a user's own aggregation of them failed."""
        if self._aggregate is not None:
            return self._users_record(self._aggregate)
        means: dict[str, float | list[float]] = {}
        for name, reports in self._reports.items():
            if (mean := self._mean(name, reports)) is not None:
                means[name] = mean
            values = [value for weight, value in reports if weight > 0]
            if self._quantiles and name != self._key and values:
                quantiles = np.quantile(values, list(QUANTILES.values())).tolist()
                means |= {f"{name}-{q}": v for q, v in zip(QUANTILES, quantiles, strict=True)}
        for name, lists in self._lists.items():
            means |= self._list_mean(name, lists)
        if self.left_out:
            _log.warning(
                "%d numbers that clients report are left out of the mean, as they are not finite "
                "(%s).",
                self.left_out.total(),
                printable(", ".join(f"{name} {count}" for name, count in self.left_out.items())),
            )
        return MetricRecord({name: means[name] for name in sorted(means)}) if means else None

    def _list_mean(
        self, name: str, lists: Sequence[tuple[float, list[float]]]
    ) -> dict[str, list[float]]:
        """Entrywise mean of the lists of the most frequent length, by name; empty if undefined."""
        lengths = Counter(len(values) for _, values in lists)
        length = max(lengths, key=lambda n: (lengths[n], n))
        sound = []
        for weight, values in lists:
            if len(values) == length and all(abs(value) <= LARGEST for value in values):
                sound.append((weight, values))
            else:
                self.left_out[name] += 1
        entries = ([(w, v[i]) for w, v in sound] for i in range(length))
        means = [mean for entry in entries if (mean := self._mean("", entry)) is not None]
        return {name: means} if len(means) == length else {}

    def _users_record(self, aggregate: MetricsAggregator) -> MetricRecord | None:
        if not self._records:
            return None
        try:
            # Sorted, so that sums have the same bytes for any order in which clients reply.
            return aggregate([self._records[c] for c in sorted(self._records)], self._key)
        except Exception as error:
            keep_user_frames(error)
            _log.exception("aggregating the metrics failed; the run continues without them")
            return None

    def _mean(self, name: str, reports: Sequence[tuple[float, float]]) -> float | None:
        """The weighted mean, or the sum for the weights themselves; None if the weight is 0."""
        # fsum rounds once: the result has the same bytes for any order of the clients.
        if name == self._key:
            return math.fsum(value for _, value in reports)
        weight = math.fsum(w for w, _ in reports)
        return math.fsum(w * v for w, v in reports) / weight if weight else None


def _records(reply: Reply) -> list[RecordDict]:
    """Each client's record, as it sent it or would have sent it in a message."""
    block, content = reply.block, reply.content
    if content is None:
        metrics = {name: values.tolist() for name, values in block.metrics.items()}
        reported = ({k: v[i] for k, v in metrics.items()} for i in range(len(block.client_ids)))
        return [RecordDict({"metrics": metric_record(numbers)}) for numbers in reported]
    return [content] if len(block.client_ids) else []


class TrainMetrics(Extra):
    """Means of clients' training metrics, in a run that shows them.

    Parameters
    ----------
    weighted_by_key, aggregate
        As for `MetricMeans`.
    """

    def __init__(self, weighted_by_key: str, aggregate: MetricsAggregator | None) -> None:
        self._empty_means = partial(MetricMeans, weighted_by_key, aggregate)
        self._means = self._empty_means()

    def send(self, instructions: Instructions) -> Instructions:
        """The instructions, unchanged; the means of the new round start empty."""
        self._means = self._empty_means()
        return instructions

    def receive(self, reply: Reply) -> None:
        """Add a reply's metrics, whether its clients' rows are usable or not."""
        self._means.add(reply)

    def finish(self, result: RoundResult) -> RoundResult:
        """The result with the means as its metrics."""
        return replace(result, metrics=self._means.record())


class MetricsSum(Protocol):
    """Aggregates the metrics of one evaluation."""

    def add(self, reply: Reply) -> None:
        """Add the metrics of a reply's clients, none of which has failed."""

    def record(self) -> MetricRecord | None:
        """The aggregated metrics to show; None if there are none."""


@dataclass(kw_only=True)
class ClientEvaluation:
    """Evaluation of the model by clients, every ``metrics.every`` rounds, and the means of it.

    Parameters
    ----------
    participants : Participants
    metrics : ClientMetrics
    fraction : float
        Fraction of the clients that evaluate; 0 for no evaluation.
    keys : RecordKeys
        Names of the records in their messages.
    aggregator : callable, optional
        As for `MetricMeans`.

    Attributes
    ----------
    last_round : int
        Round of the last aggregated evaluation; -1 before the first.
    by_client : mapping of int to mapping of str to float
        What each client reported in it; empty where metrics are released with noise.
    """

    participants: Participants
    metrics: ClientMetrics
    fraction: float
    keys: RecordKeys
    aggregator: MetricsAggregator | None = None
    last_round: int = field(default=-1, init=False)
    by_client: Mapping[int, Mapping[str, float]] = field(default_factory=dict, init=False)
    _instructions: Instructions | None = field(default=None, init=False, repr=False)

    def evaluators(self, server_round: int, grid: Grid) -> Recipients:
        """The clients that evaluate in this round: a keyed sample of the available ones."""
        return self.participants.evaluators(server_round, grid, self.fraction)

    def metrics_sum(self, server_round: int) -> MetricsSum:
        """A new aggregate of one evaluation's metrics: weighted means, without noise."""
        quantiles = self.metrics.quantiles
        return MetricMeans(self.keys.weighted_by, self.aggregator, quantiles=quantiles)

    @property
    def accounting(self) -> Accounting | None:
        """Accounting of its releases; None for metrics without noise, which are not charged."""
        return None

    def configure(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages for this round's evaluators; none in rounds without an evaluation.

        Raises
        ------
        BudgetSpentError
            If the budget does not allow the round's evaluation.
        ValueError
            If metrics of the round, or of a later one, were released before.
        """
        self._instructions = None
        if not self.fraction or server_round % self.metrics.every:
            return []
        if (accounting := self.accounting) is not None:
            if (reason := accounting.refusal(server_round)) is not None:
                raise BudgetSpentError(reason)
            if server_round <= self.last_round:
                raise ValueError(
                    f"the evaluation of round {server_round} cannot follow that of round "
                    f"{self.last_round}: its noise and its clients would be drawn twice."
                )
        recipients = self.evaluators(server_round, grid)
        server = tensors(arrays)
        self._instructions = Instructions(
            message_type="evaluate",
            round=server_round,
            arrays=arrays,
            vector=Layout.of(server).flatten(server),
            recipients=recipients,
            config=ConfigRecord({**config, "server-round": server_round}),
            keys=self.keys,
        )
        return self._instructions

    def aggregate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The aggregated metrics to show; None in rounds without an evaluation."""
        instructions, self._instructions = self._instructions, None
        if instructions is None:
            if any(True for _ in replies):  # of a subclass with its own `configure_evaluate`
                _log.warning(
                    "round %s: replies to an evaluation that this strategy did not configure are "
                    "left out; aggregate them in an aggregate_evaluate of your own.",
                    server_round,
                )
            return None
        tally = Tally(instructions.recipients.client_ids)
        if isinstance(replies, Replies):
            decoded: Iterator[Reply] = map(Reply, replies.blocks())
        else:
            decoded = read_replies(replies, instructions, tally)
        metrics = self.metrics_sum(server_round)
        for reply in decoded:
            metrics.add(replace(reply, block=tally.accept(reply.block)))
        record = metrics.record()
        if isinstance(metrics, MetricMeans):
            self.by_client = metrics.by_client
        self.last_round = server_round
        return record
