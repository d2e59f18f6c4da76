"""Evaluation of the global model by clients, on their own data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedsim.engines.arrays import tensors
from fedsim.rows import Layout
from fedsim.rows.block import Ids
from fedsim.rows.exchange import Instructions, Replies
from fedsim.strategies.outcome import Tally
from fedsim.strategies.participants import Participants, node_ids
from fedsim.strategies.replies import ExpectedReply, Reply, read
from fedsim.strategies.summaries import MetricMeans, MetricsAggregator

__all__ = ["ClientEvaluation"]


@dataclass
class ClientEvaluation:
    """Asks a keyed sample of the clients every so many rounds, and averages what they say.

    Parameters
    ----------
    participants : Participants
    fraction : float
        Of the clients that are there; 0 for no evaluation.
    every : int
        Rounds from one evaluation to the next.
    quantiles : bool
        Whether quantiles over clients stand beside the means.
    reachable : callable ``(round, client ids [n]) -> bool [n]``, optional
        Who of those that were chosen is there to be asked.
    """

    participants: Participants
    fraction: float
    every: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    aggregate_fn: MetricsAggregator | None
    quantiles: bool = False
    reachable: Callable[[int, Ids], npt.NDArray[np.bool_]] | None = None
    _asked: dict[int, int] = field(default_factory=dict, init=False)

    def configure(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages for this round's evaluators; none when it is not their turn."""
        self._asked = {}
        if self.fraction == 0 or server_round % self.every:
            return []
        nodes = self.participants.nodes(grid)
        chosen = self.participants.evaluators(server_round, nodes, self.fraction)
        if self.reachable is not None:
            chosen = chosen[self.reachable(server_round, chosen)]
            if not len(chosen):
                return []
        asked = node_ids(chosen, nodes)
        self._asked = dict(zip(asked.tolist(), chosen.tolist(), strict=True))
        server = tensors(arrays)
        return Instructions(
            message_type="evaluate",
            round=server_round,
            arrays=arrays,
            vector=Layout.of(server).flatten(server),
            client_ids=chosen,
            node_ids=asked,
            config=ConfigRecord({**config, "server-round": server_round}),
            arrayrecord_key=self.arrayrecord_key,
            configrecord_key=self.configrecord_key,
        )

    def aggregate(self, replies: Iterable[Message]) -> MetricRecord | None:
        """Weighted means of the metrics; None if nobody was asked or nobody answered."""
        asked, self._asked = self._asked, {}
        if not asked:
            return None
        tally = Tally(np.array(sorted(asked.values()), dtype=np.int64))
        if isinstance(replies, Replies):
            sent: Iterator[Reply] = map(Reply, replies.blocks())
        else:
            expected = ExpectedReply(None, None, self.arrayrecord_key, self.weighted_by_key)
            sent = read(replies, asked, expected, tally)
        means = MetricMeans(self.weighted_by_key, self.aggregate_fn, quantiles=self.quantiles)
        for reply in sent:
            means.add(replace(reply, block=tally.take(reply.block)))
        return means.record()
