"""The sum on the server: it bounds and adds the rows that clients send, and draws the noise.

Where workers of an engine train the clients, they bound and sum the rows there and then:
`ClientSumming` goes to them, and what comes back merges exactly, so that bytes do not depend on
who summed what.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Message
from torch import Tensor

from fedsim.errors import FedsimError
from fedsim.federation.aggregation.base import (
    Aggregation,
    AggregationSettings,
    Floats,
    PendingRound,
)
from fedsim.federation.aggregation.noise_prefetch import prefetched
from fedsim.federation.replies import MOST_EXAMPLES, ExpectedReply, Reply
from fedsim.mechanisms import Mechanism, PartialSum, Releaser
from fedsim.privacy.plan import ReleasePlan
from fedsim.rows import DenseRows, Layout
from fedsim.rows.block import Block, Ids, Reason
from fedsim.rows.exact import FREE_TOTAL
from fedsim.rows.exchange import Collection, Replies, Sums

Bools = npt.NDArray[np.bool_]

LIKELY_EXAMPLES = 2.0**20
"""With no more, a client whose row is too large to be summed sends too large a row."""


class ServerSum(Aggregation):
    """Rows that clients send are bounded, weighted and summed, and noised once."""

    on_workers: ClassVar[bool] = True
    """Whether a worker may sum the rows of the clients that it trains."""

    def __init__(self, settings: AggregationSettings, pending: PendingRound) -> None:
        super().__init__(settings, pending)
        counts = settings.example_counts
        self.weighing = Weighing(
            side_names=tuple(self.plan.bound.side_names),
            key=settings.weighted_by_key if self.weighs else None,
            declared=None
            if counts is None
            else DeclaredExamples(pending.client_ids, counts[pending.client_ids]),
            asked=len(pending.client_ids),
        )

    @property
    def weighs(self) -> bool:
        """Whether rows count by their clients' examples."""
        return self.plan.bound.weighting == "num-examples"

    def expected(self) -> ExpectedReply:
        """The clients' parameters, and the numbers that enter the sum."""
        settings = self.settings
        reported = self.weighs and settings.example_counts is None
        return ExpectedReply(
            self.pending.layout,
            self.pending.vector,
            settings.arrayrecord_key,
            settings.weighted_by_key,
            needed=(
                *self.plan.bound.side_names,
                *((settings.weighted_by_key,) if reported else ()),
            ),
        )

    def replies(self, messages: Iterable[Message]) -> Iterator[Reply]:
        """As of an `Aggregation`; from workers, without the rows that they have summed."""
        if not (self.on_workers and isinstance(messages, Replies) and messages.sums):
            return super().replies(messages)
        total = self.total
        summing = ClientSumming(
            self.plan,
            self.pending.layout,
            {name: tensor.cpu().numpy() for name, tensor in self.pending.state.items()},
            self.weighing,
        )
        sent = map(Reply, messages.blocks(Collection(summing, total.merge)))
        # Workers train, and this process only waits for them: it draws the noise meanwhile.
        self._source = prefetched(self.source, self.releaser.draw_sizes(total))
        return self.counted(sent)

    def counted(self, sent: Iterator[Reply]) -> Iterator[Reply]:
        """Those whose weights and scalars may enter the sum."""
        for reply in super().counted(sent):
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
        """As of an `Aggregation`; a worker that has summed the rows says which were usable."""
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


@dataclass(frozen=True)
class DeclaredExamples:
    """How many examples clients are declared to have.

    Attributes
    ----------
    client_ids : int64 ``[a]``
        Sorted.
    counts : float64 ``[a]``
    """

    client_ids: Ids
    counts: Floats

    def of(self, client_ids: Ids) -> Floats:
        """Those of clients that are among them, ``[n]``."""
        return self.counts[np.searchsorted(self.client_ids, client_ids)]


@dataclass(frozen=True)
class Weighing:
    """What of the numbers that clients report enters a sum.

    Attributes
    ----------
    side_names : tuple of str
        Scalars that the mechanism releases the means of.
    key : str or None
        Metric that weighs a client's row; None where all rows weigh the same.
    declared : DeclaredExamples or None
        They weigh in place of what clients report.
    asked : int
        Clients asked in this round.
    """

    side_names: tuple[str, ...]
    key: str | None
    declared: DeclaredExamples | None
    asked: int

    def sides(self, block: Block) -> dict[str, Floats]:
        """The scalars by name, ``[n]``."""
        return {name: _reported(block, name) for name in self.side_names}

    def weights(self, block: Block) -> Floats | None:
        """Weight of each row, ``[n]``; None where all weigh the same."""
        if self.key is None:
            return None
        return self.declared.of(block.client_ids) if self.declared else _reported(block, self.key)

    def unsound(self, block: Block) -> dict[int, Reason]:
        """Clients whose weights or scalars may not enter the sum, and why."""
        reasons: dict[int, Reason] = {}

        def require(sound: Bools, reason: Reason) -> None:
            for client in block.client_ids[~sound & block.ok].tolist():
                reasons.setdefault(client, reason)

        for values in self.sides(block).values() if block.ok.any() else ():
            require(np.isfinite(values), "non-finite")
        weights = self.weights(block) if block.ok.any() else None
        if weights is not None:
            require((weights >= 0) & (weights <= MOST_EXAMPLES), "malformed")
            assert block.rows is not None
            norms = torch.linalg.vector_norm(block.rows, dim=1, dtype=torch.float64).cpu().numpy()
            with np.errstate(all="ignore"):
                reach = np.where(np.isfinite(norms), weights * norms, 0.0)
            # However many do so, the weighted sum stays one that is exact. What is beyond that with
            # a weight that somebody may have has diverged, like what is infinite.
            fits = reach <= FREE_TOTAL / self.asked
            require(fits | (weights > LIKELY_EXAMPLES), "non-finite")
            require(fits, "malformed")
        return reasons

    def add(self, total: PartialSum, block: Block) -> Tensor:
        """Add the rows of a block of sound clients; which the sum contains, bool ``[n]``."""
        assert block.rows is not None
        return total.add(
            DenseRows(block.rows), weights=self.weights(block), sides=self.sides(block)
        )


@dataclass(frozen=True)
class ClientSumming:
    """The bound of a round and its state, as plain arrays: what workers sum by (`Summing`).

    Attributes
    ----------
    plan, layout
        As for `Releaser`.
    state : mapping of name to ndarray
        The mechanism's.
    weighing : Weighing
    """

    plan: ReleasePlan[Mechanism]
    layout: Layout
    state: Mapping[str, npt.NDArray[np.float64]]
    weighing: Weighing

    def start(self, device: torch.device) -> BlockSummer:
        """An empty sum, for rows that come on ``device``."""
        releaser = Releaser(self.plan, self.layout, device=device)
        state = {name: torch.from_numpy(np.array(values)) for name, values in self.state.items()}
        return BlockSummer(releaser.start(state), self.weighing)


class BlockSummer:
    """A worker's part of a round's sum (`BlockSum`)."""

    def __init__(self, total: PartialSum, weighing: Weighing) -> None:
        self._total, self._weighing = total, weighing

    def add(self, block: Block) -> Block:
        """Add a block's rows; a client whose numbers may not enter the sum has failed."""
        reasons = {**block.reasons, **self._weighing.unsound(block)}
        ok = block.ok & ~np.isin(block.client_ids, list(reasons))
        usable = torch.zeros(len(ok), dtype=torch.bool)
        if ok.any():
            usable[torch.from_numpy(ok)] = self._weighing.add(
                self._total, block if ok.all() else block.select(ok)
            ).cpu()
        return Block(block.client_ids, None, block.metrics, ok, reasons, usable)

    def merge(self, sums: Sums) -> None:
        """A worker's part of a round's sum (`BlockSum`)."""
        self._total.merge(sums)

    def state(self) -> Sums:
        """A worker's part of a round's sum (`BlockSum`)."""
        return self._total.state()


def _reported(block: Block, name: str) -> Floats:
    if name not in block.metrics:
        raise FedsimError(f"clients report no '{name}', which the mechanism or its weights need.")
    return block.metrics[name]
