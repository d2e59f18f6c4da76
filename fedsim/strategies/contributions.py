"""From a round's replies to a mechanism's sum, each client of the cohort at most once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor

from fedsim.engines.arrays import array_record
from fedsim.mechanisms import (
    Mechanism,
    NoiseSource,
    PartialSum,
    Release,
    Releaser,
    State,
)
from fedsim.privacy.plan import ReleasePlan
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import Layout
from fedsim.rows.block import Block, Ids
from fedsim.rows.exchange import DECLARED_EXAMPLES, Collection, Replies
from fedsim.strategies.drawing_ahead import drawn_ahead
from fedsim.strategies.outcome import Tally
from fedsim.strategies.replies import ExpectedReply, Reply, read
from fedsim.strategies.summing import ClientSumming, DeclaredExamples, Weighing
from fedsim.training.share_replies import SIDE_PREFIX, STATE_RECORD, USABLE
from fedsim.training.shares import ShareRequest, Shares, add_shares, share

__all__ = ["Asked", "Contributions", "Placement", "RoundSum"]

Floats = npt.NDArray[np.float64]
Placement = Literal["server", "client"]


@dataclass(frozen=True)
class Asked:
    """A round that has been configured and not yet aggregated.

    Attributes
    ----------
    client_ids : int64 ``[a]``
        Those of the cohort who were there to be asked, sorted.
    absent : int
        How many others were drawn.
    client_of : mapping of node id to client id
        The same.
    server : mapping of name to Tensor
        The global parameters, entries that are not trained included.
    vector : Tensor ``[d]``
    """

    round: int
    client_ids: Ids
    absent: int
    client_of: dict[int, int]
    server: dict[str, Tensor]
    vector: Tensor


@dataclass(frozen=True)
class RoundSum(Iterable[tuple[Reply, Tensor]]):
    """A round's replies, each added to the sum as it is iterated over.

    Iterating gives each reply, and which of its clients the sum now contains, bool ``[n]``.

    Attributes
    ----------
    asked : Asked
    releaser : Releaser
    total : PartialSum
    source : NoiseSource
        Of the release's noise, which is nobody's before the ledger has its line.
    tally : Tally
    added : iterator
    """

    asked: Asked
    releaser: Releaser
    total: PartialSum
    source: NoiseSource
    tally: Tally
    added: Iterator[tuple[Reply, Tensor]]

    def __iter__(self) -> Iterator[tuple[Reply, Tensor]]:
        return self.added


@dataclass(frozen=True)
class Contributions:
    """Adds blocks to a sum, bounded by the server or by the clients themselves.

    On fedsim's engines in this process, clients' shares are made here, from the draws that
    each client would have used; Flower's clients send them.
    """

    plan: ReleasePlan[Mechanism]
    placement: Placement
    randomness: Randomness
    weighted_by_key: str
    arrayrecord_key: str
    example_counts: Floats | None = None
    """Declared by client id; they weigh in place of what clients report."""
    needs_rows: bool = False
    """Whether the strategy wants each client's row, so that no worker may sum them."""
    _releasers: dict[tuple[Layout, str], Releaser] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def summed(
        self, asked: Asked, replies: Iterable[Message], layout: Layout, state: State
    ) -> RoundSum:
        """A round's sum, to which nothing is added as yet; it lies where rows come."""
        tally, weighing = Tally(asked.client_ids, absent=asked.absent), self._weighing(asked)
        source = self._source(Purpose.NOISE, asked.round)
        summable = self.placement == "server" and not self.needs_rows
        if isinstance(replies, Replies) and replies.sums and summable:
            releaser = self.releaser(layout, asked.vector.device)
            total = releaser.start(state)
            collection = Collection(self._summing(weighing, layout, state), total.merge)
            sent = self._replies(asked, replies, layout, tally, weighing, collection)
            source = drawn_ahead(source, releaser.draw_sizes(total))
        else:
            sent = self._replies(asked, replies, layout, tally, weighing)
            first = next(sent, None)
            rows = asked.vector if first is None or first.block.rows is None else first.block.rows
            releaser = self.releaser(layout, rows.device)
            total = releaser.start(state)
            sent = chain([] if first is None else [first], sent)
        added = (
            (reply, self._add(releaser, total, asked, reply, tally, weighing)) for reply in sent
        )
        return RoundSum(asked, releaser, total, source, tally, added)

    def release(self, gathered: RoundSum) -> Release:
        """The round's release; of shares, the server adds what missing clients would have."""
        asked = gathered.asked
        return gathered.releaser.release(
            gathered.total,
            gathered.source,
            asked=len(asked.client_of) if self.placement == "client" else None,
        )

    def content(self, gathered: RoundSum) -> Iterator[bytes]:
        """All of a round that its release follows from, but for the noise."""
        total, shares = gathered.total, self.placement == "client"
        usable = (len(gathered.asked.client_of), total.count) if shares else ()
        yield repr((sorted(total.grids), sorted(total.before), usable)).encode()
        for name in sorted(total.before):
            yield _bytes(total.before[name])
        for name in sorted(total.grids):
            grid = total.grids[name]
            for tensor in (grid.radius, grid.coarse, grid.fine):
                yield b"" if tensor is None else _bytes(tensor)

    def _replies(
        self,
        asked: Asked,
        replies: Iterable[Message],
        layout: Layout,
        tally: Tally,
        weighing: Weighing,
        collection: Collection | None = None,
    ) -> Iterator[Reply]:
        """Each client of the cohort at most once, and nobody who failed."""
        if isinstance(replies, Replies):
            sent: Iterator[Reply] = map(Reply, replies.blocks(collection))
        else:
            expected = ExpectedReply(
                layout,
                asked.vector,
                self.arrayrecord_key,
                self.weighted_by_key,
                shares=self.placement == "client",
                needed=self._needed,
            )
            sent = read(replies, asked.client_of, expected, tally)
        for reply in sent:
            block = tally.take(reply.block)
            if block.usable is None and (self.placement == "server" or reply.content is None):
                block = _trusted(block, weighing, tally)
            if len(block.client_ids):
                yield reply if block is reply.block else replace(reply, block=block)

    def releaser(self, layout: Layout, device: torch.device | str = "cpu") -> Releaser:
        """Of the round's sum.

        Raises
        ------
        FedsimError
            If the noise and the mechanism do not go together.
        """
        # It has no state: one does for all rounds.
        key = layout, str(device)
        if key not in self._releasers:
            self._releasers[key] = Releaser(self.plan, layout, device=device)
        return self._releasers[key]

    def _add(
        self,
        releaser: Releaser,
        total: PartialSum,
        asked: Asked,
        reply: Reply,
        tally: Tally,
        weighing: Weighing,
    ) -> Tensor:
        """Add a block's rows, or its clients' shares; which of them are usable, bool ``[n]``."""
        block = reply.block
        if self.placement == "server":
            usable = weighing.add(total, block) if block.usable is None else block.usable
            weights = weighing.weights(block)
            # Without examples a client weighs nothing, which is no failure.
            counted = slice(None) if weights is None else weights > 0
            tally.doubt(block.client_ids[counted], usable[counted], "non-finite")
            return usable
        sent = reply.content is not None
        sides = {} if sent else weighing.sides(block)
        shares = self._sent(block) if sent else self._made(releaser, total, asked, block, sides)
        usable = add_shares(total, shares, asked=len(asked.client_ids))
        # That its row was not finite a client says; anything else its share cannot be.
        tally.doubt(block.client_ids, usable, "malformed")
        tally.doubt(block.client_ids, shares.usable, "non-finite")
        return usable

    @property
    def _needed(self) -> tuple[str, ...]:
        """Numbers that a reply must have."""
        if self.placement == "client":
            return (USABLE,)
        reported = self._weighs and self.example_counts is None
        return (*self.plan.bound.side_names, *((self.weighted_by_key,) if reported else ()))

    def _weighing(self, asked: Asked) -> Weighing:
        counts = self.example_counts
        return Weighing(
            side_names=tuple(self.plan.bound.side_names),
            key=self.weighted_by_key if self._weighs else None,
            declared=None
            if counts is None
            else DeclaredExamples(asked.client_ids, counts[asked.client_ids]),
            asked=len(asked.client_ids),
        )

    def _summing(self, weighing: Weighing, layout: Layout, state: State) -> ClientSumming:
        return ClientSumming(
            self.plan,
            layout,
            {name: tensor.cpu().numpy() for name, tensor in state.items()},
            weighing,
        )

    def _source(self, purpose: Purpose, server_round: int, client: int = 0) -> NoiseSource:
        """The noise of a round: the server's, or one client's."""
        generator = self.randomness.generator(
            purpose, level="client", round=server_round, client=client
        )
        return NoiseSource(generator, hardened=self.plan.noise.hardened)

    def request(
        self, asked: int, state: State, layout: Layout
    ) -> tuple[dict[str, float | int | str], dict[str, ArrayRecord]]:
        """What to tell clients that noise their own rows: config entries and records."""
        if self.placement == "server":
            return {}, {}
        bounding = self.plan.bound.bounding_state(state, layout)
        return self._share_request(asked).entries(), {STATE_RECORD: array_record(bounding)}

    def _share_request(self, asked: int) -> ShareRequest:
        return ShareRequest.of_plan(self.plan, asked, self.randomness.release or "")

    def _made(
        self,
        releaser: Releaser,
        total: PartialSum,
        asked: Asked,
        block: Block,
        sides: Mapping[str, Floats],
    ) -> Shares:
        assert block.rows is not None
        return share(
            self._share_request(len(asked.client_of)),
            block.rows,
            self.plan.bound.bounding_state(total.before, releaser.layout),
            releaser.layout,
            sources=[
                self._source(Purpose.SHARE, asked.round, client)
                for client in block.client_ids.tolist()
            ],
            sides=sides,
        )

    def _sent(self, block: Block) -> Shares:
        assert block.rows is not None
        sides = {
            name.removeprefix(SIDE_PREFIX): torch.from_numpy(values)
            for name, values in block.metrics.items()
            if name.startswith(SIDE_PREFIX)
        }
        return Shares(block.rows, sides, torch.from_numpy(block.metrics[USABLE] > 0))

    @property
    def _weighs(self) -> bool:
        return self.plan.bound.weighting == "num-examples"

    def declared(self, client_ids: Ids) -> dict[str, list[int]]:
        """What each of these clients is told that it is weighed by."""
        if self.example_counts is None:
            return {}
        return {DECLARED_EXAMPLES: self.example_counts[client_ids].astype(int).tolist()}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def _trusted(block: Block, weighing: Weighing, tally: Tally) -> Block:
    """The clients of a block whose weights and scalars may enter the sum."""
    unsound = weighing.unsound(block)
    if not unsound:
        return block
    for client, reason in unsound.items():
        tally.reject(np.array([client]), reason)
    return block.select(~np.isin(block.client_ids, list(unsound)))
