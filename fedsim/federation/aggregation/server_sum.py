"""The aggregation of one round: what its clients are asked, and what becomes of their replies.

A strategy makes one for each round, and goes through it in this order::

    messages = aggregation.request(instructions)
    while (stage := aggregation.next_stage(replies)) is not None:  # most have one stage
        replies = grid.send_and_receive(stage)
    for reply in aggregation.replies(replies):
        aggregation.add(reply)
    ledger.record(..., aggregation.content())
    release = aggregation.release()

Nothing is drawn or released before the ledger has its line, and no engine, wrapper or loop knows
more of an aggregation than this. `ServerSum` is the plain one: the server bounds and adds the rows
that clients send, and draws the noise. Other aggregations change one or two of its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from flwr.app import Message
from torch import Tensor

from fedsim.federation.aggregation.robust_mean import RobustMean
from fedsim.federation.aggregation.worker_sums import Floats, Weighing, WorkerSumming, prefetched
from fedsim.federation.replies import ExpectedReply, Reply, read
from fedsim.federation.round_report import Tally
from fedsim.mechanisms import Mechanism, NoiseSource, PartialSum, Release, Releaser, State
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import Layout
from fedsim.rows.block import Ids, Reason
from fedsim.rows.exchange import DECLARED_EXAMPLES, Collection, Instructions, Replies


@dataclass(frozen=True)
class PendingRound:
    """A round that has been configured and not yet aggregated.

    Attributes
    ----------
    round : int
    client_ids : int64 ``[a]``
        Those of the cohort who were available and were asked, sorted.
    absent : int
        How many others were drawn.
    client_of : mapping of node id to client id
        Those who were asked.
    server : mapping of name to Tensor
        The global parameters, entries that are not trained included.
    vector : Tensor ``[d]``
        What rows are differences from.
    layout : Layout
        Of a row.
    state : State
        The mechanism's, as of this round.
    """

    round: int
    client_ids: Ids
    absent: int
    client_of: dict[int, int]
    server: dict[str, Tensor]
    vector: Tensor
    layout: Layout
    state: State


@dataclass(frozen=True)
class AggregationSettings:
    """What the aggregations of all rounds have in common.

    Attributes
    ----------
    plan : ReleasePlan
    randomness : Randomness
        Where a round's noise comes from.
    weighted_by_key, arrayrecord_key : str
        Of clients' replies.
    example_counts : float64 ``[population]``, optional
        Declared by client id; they weigh in place of what clients report.
    """

    plan: ReleasePlan[Mechanism]
    randomness: Randomness
    weighted_by_key: str
    arrayrecord_key: str
    example_counts: Floats | None = None
    _releasers: dict[tuple[Layout, str], Releaser] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def releaser(self, layout: Layout, device: torch.device | str = "cpu") -> Releaser:
        """Of a round's sum on this device; it has no state, so that one does for all rounds.

        Raises
        ------
        FedsimError
            If the noise and the mechanism do not go together.
        """
        key = layout, str(device)
        if key not in self._releasers:
            self._releasers[key] = Releaser(self.plan, layout, device=device)
        return self._releasers[key]

    def noise_source(self, purpose: Purpose, server_round: int, client: int = 0) -> NoiseSource:
        """The noise of a round: the server's, or one client's."""
        generator = self.randomness.generator(
            purpose, level="client", round=server_round, client=client
        )
        return NoiseSource(generator, hardened=self.plan.noise.hardened)


class ServerSum:
    """Rows that clients send are bounded, weighted and summed, and noised once.

    Where workers of an engine train the clients, they bound and sum the rows there and then:
    `WorkerSumming` goes to them, and what comes back merges exactly, so that bytes do not depend
    on who summed what.

    Parameters
    ----------
    settings : AggregationSettings
    pending : PendingRound

    Attributes
    ----------
    tally : Tally
        What became of each client that was asked.
    """

    on_workers: ClassVar[bool] = True
    """Whether a worker may sum the rows of the clients that it trains."""

    def __init__(self, settings: AggregationSettings, pending: PendingRound) -> None:
        self.settings, self.plan, self.pending = settings, settings.plan, pending
        self.tally = Tally(pending.client_ids, absent=pending.absent)
        self.releaser: Releaser
        self._total: PartialSum | None = None
        self._drawn_ahead: NoiseSource | None = None
        counts, ids = settings.example_counts, pending.client_ids
        self.weighing = Weighing(
            side_names=tuple(self.plan.bound.side_names),
            key=settings.weighted_by_key if self.plan.bound.weighting == "num-examples" else None,
            declared=None if counts is None else (ids, counts[ids]),
            asked=len(ids),
        )

    def request(self, instructions: Instructions) -> Instructions:
        """The first stage: the round's instructions, and what this aggregation adds to them."""
        counts = self.settings.example_counts
        if counts is None:
            return instructions
        declared = counts[instructions.client_ids].astype(int).tolist()
        return replace(instructions, numbers={DECLARED_EXAMPLES: declared})

    def next_stage(self, replies: Iterable[Message]) -> Iterable[Message] | None:
        """What clients are asked after these replies; None if the replies are the last ones."""
        return None

    def replies(self, messages: Iterable[Message]) -> Iterator[Reply]:
        """The last stage's replies: each client at most once, and only those that may be added.

        Clients of fedsim's own engines are trained as this is iterated over. From workers, rows
        come added up already, and the replies are without.
        """
        if not isinstance(messages, Replies):
            return self._sound(read(messages, self.pending.client_of, self.expected(), self.tally))
        if not (self.on_workers and messages.sums):
            return self._sound(map(Reply, messages.blocks()))
        state = {name: tensor.cpu().numpy() for name, tensor in self.pending.state.items()}
        summing = WorkerSumming(self.plan, self.pending.layout, state, self.weighing)
        sent = map(Reply, messages.blocks(Collection(summing, self.total.merge)))
        # Workers train, and this process only waits for them: it draws the noise meanwhile. None
        # of it is used before the ledger has its line.
        sizes = self.releaser.draw_sizes(self.total)
        self._drawn_ahead = prefetched(self._noise_source(), sizes)
        return self._sound(sent)

    def _noise_source(self) -> NoiseSource:
        return self.settings.noise_source(Purpose.NOISE, self.pending.round)

    def expected(self) -> ExpectedReply:
        """What a usable reply is like: the clients' parameters, and numbers that enter the sum."""
        settings, weighing = self.settings, self.weighing
        reports_weight = weighing.key is not None and weighing.declared is None
        return ExpectedReply(
            self.pending.layout,
            self.pending.vector,
            settings.arrayrecord_key,
            settings.weighted_by_key,
            needed=(
                *weighing.side_names,
                *((settings.weighted_by_key,) if reports_weight else ()),
            ),
        )

    def _sound(self, sent: Iterator[Reply]) -> Iterator[Reply]:
        """Replies of clients that count, and whose weights and scalars may enter the sum."""
        for reply in sent:
            if (block := self.tally.take(reply.block)) is not reply.block:
                reply = replace(reply, block=block)
            if unsound := self.unsound(reply):
                for client, reason in unsound.items():
                    self.tally.reject(np.array([client]), reason)
                sound = ~np.isin(reply.block.client_ids, list(unsound))
                reply = replace(reply, block=reply.block.select(sound))
            if len(reply.block.client_ids):
                yield reply

    def unsound(self, reply: Reply) -> dict[int, Reason]:
        """Clients whose weights or scalars may not enter the sum; a worker has left them out."""
        return self.weighing.unsound(reply.block) if reply.block.usable is None else {}

    def add(self, reply: Reply) -> Tensor:
        """Add a block's rows; which of its clients are now in the sum, bool ``[n]``."""
        block = reply.block
        usable = block.usable
        if usable is None:
            assert block.rows is not None
            usable = self.weighing.add(self.total_on(block.rows.device), block)
        weights = self.weighing.weights(block)
        # Without examples a client weighs nothing, which is no failure.
        counted = slice(None) if weights is None else weights > 0
        self.tally.doubt(block.client_ids[counted], usable[counted], "non-finite")
        return usable

    @property
    def shares_asked(self) -> int | None:
        """How many clients were asked for shares of the noise; None where the server draws it."""
        return None

    @property
    def count(self) -> int:
        """How many clients are in the sum."""
        return self.total.count

    @property
    def total(self) -> PartialSum:
        """The sum; it lies where the first rows came, or where the parameters are."""
        return self.total_on(self.pending.vector.device)

    def total_on(self, device: torch.device) -> PartialSum:
        """The sum, which begins empty on this device if nothing was added before."""
        if self._total is None:
            self.releaser = self.settings.releaser(self.pending.layout, device)
            self._total = self.releaser.start(self.pending.state)
        return self._total

    def content(self) -> Iterator[bytes]:
        """All of the round that its release follows from, but for the noise."""
        total = self.total
        shares = () if self.shares_asked is None else (self.shares_asked, self.count)
        yield repr((sorted(total.grids), sorted(total.before), shares)).encode()
        for name in sorted(total.before):
            yield _bytes(total.before[name])
        for name in sorted(total.grids):
            grid = total.grids[name]
            for tensor in (grid.radius, grid.coarse, grid.fine):
                yield b"" if tensor is None else _bytes(tensor)

    def release(self) -> Release:
        """The round's one release."""
        total = self.total
        source = self._drawn_ahead or self._noise_source()
        return self.releaser.release(total, source, asked=self.shares_asked)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


class RobustAggregation(ServerSum):
    """Keeps the usable rows of a round, and releases their centre in place of their mean.

    Which rows are usable the plain sum says: what may enter a robust mean may enter a mean.
    """

    on_workers: ClassVar[bool] = False

    def __init__(
        self, mean: RobustMean, settings: AggregationSettings, pending: PendingRound
    ) -> None:
        super().__init__(settings, pending)
        self._mean = mean
        self._client_ids: list[int] = []
        self._rows: list[Tensor] = []

    def add(self, reply: Reply) -> Tensor:
        """Keep the rows of those who are usable, bool ``[n]``."""
        usable = super().add(reply)
        block = reply.block
        assert block.rows is not None
        self._client_ids += block.client_ids[usable.cpu().numpy()].tolist()
        self._rows.append(block.rows[usable.to(block.rows.device)])
        return usable

    def release(self) -> Release:
        """The robust mean, in the order of client ids; without rows the mean of none, zero."""
        release = super().release()
        if not self._client_ids:
            return release
        order = torch.tensor(self._client_ids).argsort()
        rows = torch.cat(self._rows)
        return replace(release, mean=self._mean.center(rows[order.to(rows.device)]))
