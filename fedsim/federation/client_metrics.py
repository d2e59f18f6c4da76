"""Metrics that clients report: of their training, and of the global model on their data."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedsim.federation.accounting import Accounting
from fedsim.federation.arrays import tensors
from fedsim.federation.client_settings import ClientMetrics
from fedsim.federation.exchange import Instructions, Recipients, Replies
from fedsim.federation.extras import LARGEST, Extra, RoundResult
from fedsim.federation.participants import Participants
from fedsim.federation.replies import ExpectedReply, RecordKeys, Reply, read
from fedsim.federation.round_report import Tally
from fedsim.rows import Layout
from fedsim.rows.block import CLIENT_STATE

QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}
"""Over clients with examples, each counting the same: what their metrics are called, and which."""

_log = logging.getLogger("fedsim")

MetricsAggregator = Callable[[list[RecordDict], str], MetricRecord]
"""As Flower's ``train_metrics_aggr_fn``: from one record a client to the aggregate."""


class MetricMeans:
    """Weighted means of metrics over clients; the number of examples itself is summed.

    A metric is averaged over the clients that report a number for it, a list entry by entry
    over those whose lists are as long as most. What is not finite is left out, and counted.

    Parameters
    ----------
    weighted_by_key : str
        Metric that weighs the others; clients without it count one each.
    aggregate : callable, optional
        A user's own, in Flower's form: it is given each client's own record instead.
    quantiles : bool
        Whether `QUANTILES` of each metric stand beside its mean, as ``accuracy-p10``.

    Attributes
    ----------
    left_out : mapping of str to int
        How many numbers of a metric were not finite, or beyond 1e100.
    """

    def __init__(
        self,
        weighted_by_key: str,
        aggregate: MetricsAggregator | None = None,
        *,
        quantiles: bool = False,
    ) -> None:
        self.left_out: Counter[str] = Counter()
        self._quantiles = quantiles
        self._key = weighted_by_key
        self._aggregate = aggregate
        self._records: list[RecordDict] = []
        self._reports: dict[str, list[tuple[float, float]]] = {}
        self._lists: dict[str, list[tuple[float, list[float]]]] = {}

    def add(self, reply: Reply) -> None:
        """Take in what clients report, none of whom failed."""
        block = reply.block
        if self._aggregate is not None and reply.content is not None and len(block.client_ids):
            self._records.append(reply.content)
            return
        metrics = {k: v.tolist() for k, v in block.metrics.items() if not _is_state(k)}
        if self._aggregate is not None:
            self._records += [
                RecordDict({"metrics": MetricRecord({k: v[i] for k, v in metrics.items()})})
                for i in range(len(block.client_ids))
            ]
            return
        weights = metrics.get(self._key, [1.0] * len(block.client_ids))
        for name, values in metrics.items():
            self._note(name, weights, values)
        for name, entries in reply.lists.items() if weights else ():
            if not _is_state(name):
                self._lists.setdefault(name, []).append((weights[0], entries))

    def _note(self, name: str, weights: Sequence[float], values: Sequence[float]) -> None:
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
                drawn = np.quantile(values, list(QUANTILES.values())).tolist()
                means |= {f"{name}-{q}": v for q, v in zip(QUANTILES, drawn, strict=True)}
        for name, lists in self._lists.items():
            means |= self._list_mean(name, lists)
        if self.left_out:
            _log.warning(
                "%d numbers that clients report stand in no mean, as they are not finite (%s).",
                self.left_out.total(),
                ", ".join(f"{name} {count}" for name, count in self.left_out.items()),
            )
        return MetricRecord({name: means[name] for name in sorted(means)}) if means else None

    def _list_mean(
        self, name: str, lists: Sequence[tuple[float, list[float]]]
    ) -> dict[str, list[float]]:
        """The mean of lists as long as most of them are, if it has one."""
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
            return aggregate(self._records, self._key)
        except Exception:
            _log.exception("aggregating the metrics failed; the run continues without them")
            return None

    def _mean(self, name: str, reports: Sequence[tuple[float, float]]) -> float | None:
        """The weighted mean; None over no reports."""
        # fsum: the same bytes in whatever order clients report.
        if name == self._key:
            return math.fsum(value for _, value in reports)
        weight = math.fsum(w for w, _ in reports)
        return math.fsum(w * v for w, v in reports) / weight if weight else None


def _is_state(name: str) -> bool:
    return name.startswith(f"{CLIENT_STATE}.")


class TrainMetrics(Extra):
    """Means of what clients report of their training, in a run that shows them.

    Parameters
    ----------
    weighted_by_key, aggregate
        As for `MetricMeans`.
    """

    def __init__(self, weighted_by_key: str, aggregate: MetricsAggregator | None) -> None:
        self._new = partial(MetricMeans, weighted_by_key, aggregate)
        self._means = self._new()

    def send(self, instructions: Instructions) -> Instructions:
        """Unchanged: a round begins, of which nothing is known."""
        self._means = self._new()
        return instructions

    def take(self, reply: Reply) -> None:
        """Take in what clients report, whether their rows are usable or not."""
        self._means.add(reply)

    def finish(self, result: RoundResult) -> RoundResult:
        """With the means."""
        return replace(result, metrics=self._means.record())


class MetricsSum(Protocol):
    """The aggregate of the metrics of one evaluation."""

    def add(self, reply: Reply) -> None:
        """Take in what clients report, none of whom failed."""

    def record(self) -> MetricRecord | None:
        """What is shown of them, if anything."""


@dataclass(kw_only=True)
class ClientEvaluation:
    """Has clients evaluate the model on their examples every so many rounds, and shows the means.

    Parameters
    ----------
    participants : Participants
    metrics : ClientMetrics
    fraction : float
        Of the clients that evaluate; 0 for no evaluation.
    keys : RecordKeys
        How their messages are read.
    aggregator : callable, optional
        As for `MetricMeans`.

    Attributes
    ----------
    last_round : int
        The last one that was aggregated; -1 before it.
    """

    participants: Participants
    metrics: ClientMetrics
    fraction: float
    keys: RecordKeys
    aggregator: MetricsAggregator | None = None
    last_round: int = field(default=-1, init=False)
    _recipients: Recipients | None = field(default=None, init=False, repr=False)

    def evaluators(self, server_round: int, grid: Grid) -> Recipients:
        """Which clients evaluate in this round: a keyed sample of those that are available."""
        return self.participants.evaluators(server_round, grid, self.fraction)

    def metrics_sum(self, server_round: int) -> MetricsSum:
        """What aggregates their metrics: weighted means, without noise."""
        quantiles = self.metrics.quantiles
        return MetricMeans(self.keys.weighted_by, self.aggregator, quantiles=quantiles)

    @property
    def accounting(self) -> Accounting | None:
        """Of its releases; None where metrics are shown without noise, and nothing is charged."""
        return None

    def due(self, server_round: int) -> bool:
        """Whether clients evaluate in this round."""
        return self.fraction > 0 and server_round % self.metrics.every == 0

    def stops(self, server_round: int) -> str | None:
        """Why this round's evaluation may not be made, if so: a budget does not allow it."""
        if self.accounting is None or not self.due(server_round):
            return None
        return self.accounting.stops(server_round)

    def configure(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages for this round's evaluators; none in rounds without an evaluation.

        Raises
        ------
        ValueError
            If metrics of the round, or of a later one, were released before.
        """
        self._recipients = None
        if not self.due(server_round):
            return []
        if self.accounting is not None and server_round <= self.last_round:
            raise ValueError(
                f"the evaluation of round {server_round} cannot follow that of round "
                f"{self.last_round}: its noise and its clients would be drawn twice."
            )
        self._recipients = recipients = self.evaluators(server_round, grid)
        server = tensors(arrays)
        return Instructions(
            message_type="evaluate",
            round=server_round,
            arrays=arrays,
            vector=Layout.of(server).flatten(server),
            recipients=recipients,
            config=ConfigRecord({**config, "server-round": server_round}),
            keys=self.keys,
        )

    def aggregate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """What is shown of the metrics; None in rounds without an evaluation."""
        recipients, self._recipients = self._recipients, None
        if recipients is None:
            return None
        tally = Tally(recipients.client_ids)
        if isinstance(replies, Replies):
            sent: Iterator[Reply] = map(Reply, replies.blocks())
        else:
            expected = ExpectedReply(None, None, self.keys)
            sent = read(replies, recipients.client_of, expected, tally)
        metrics = self.metrics_sum(server_round)
        for reply in sent:
            metrics.add(replace(reply, block=tally.take(reply.block)))
        record = metrics.record()
        self.last_round = server_round
        return record
