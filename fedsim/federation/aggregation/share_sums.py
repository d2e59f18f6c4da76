"""Aggregations of shares: the server adds up rows that clients have bounded and noised.

What missing clients would have added to the noise, the server adds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch
from flwr.app import ConfigRecord
from torch import Tensor

from fedsim.federation.aggregation.server_sum import AggregationSettings, PendingRound, ServerSum
from fedsim.federation.aggregation.shares import (
    SIDE_PREFIX,
    STATE_RECORD,
    USABLE,
    ShareRequest,
    Shares,
    SharesInUnits,
    share,
    summed_grids,
)
from fedsim.federation.arrays import array_record
from fedsim.federation.exchange import Instructions
from fedsim.federation.replies import ExpectedReply, Reply
from fedsim.mechanisms import PartialSum
from fedsim.privacy.noise import share_multiplier
from fedsim.rows import DenseRows
from fedsim.rows.block import Block
from fedsim.rows.exact import RowMasks

# No honest share is so many standard deviations of its noise beyond its bound, in one entry
# (probability below 1e-300) or in all of them together (e^-FARTHEST, 4e-18).
FARTHEST = 40.0


class ShareSum(ServerSum):
    """Base of aggregations of shares: how clients are asked for theirs, and how they make them.

    Parameters
    ----------
    settings : AggregationSettings
    pending : PendingRound
    parts : int
        Into how many shares the noise of the release is divided.
    """

    on_workers: ClassVar[bool] = False

    def __init__(self, settings: AggregationSettings, pending: PendingRound, parts: int) -> None:
        super().__init__(settings, pending)
        release, plan = settings.randomness.release or "", self.plan
        self.share_request = ShareRequest(plan.bound, plan.noise, plan.denominator, parts, release)
        self._bounding = plan.bound.bounding_state(pending.state, pending.layout)

    def training(self, instructions: Instructions) -> Instructions:
        """The round's instructions, the noise of a share, and the state that bounds a row."""
        return replace(
            super().training(instructions),
            config=ConfigRecord({**instructions.config, **self.share_request.entries()}),
            records={STATE_RECORD: array_record(self._bounding)},
        )

    def shares_of(self, block: Block) -> SharesInUnits:
        """The shares that a block's clients would send, from the draws that they would use."""
        assert block.rows is not None
        noise, number = self.settings.noise, self.pending.round
        return share(
            self.share_request,
            block.rows,
            self._bounding,
            self.pending.layout,
            sources=[noise.share(number, client) for client in block.client_ids.tolist()],
            sides=self.summing.sides(block),
        )


class ClientShares(ShareSum):
    """Each sampled client sends its bounded row with noise of variance ``z^2 C^2 / asked``.

    What missing clients would have added the server adds, so that the total is the same.
    """

    def __init__(self, settings: AggregationSettings, pending: PendingRound) -> None:
        self.shares_asked = asked = len(pending.recipients.client_ids)
        super().__init__(settings, pending, asked)

    def expected(self) -> ExpectedReply:
        """A share, and whether its row was finite."""
        return replace(super().expected(), shares=True, needed=(USABLE,))

    def add(self, reply: Reply) -> Reply:
        """Add the clients' shares; the reply of those who could make one."""
        block = reply.block
        # A share contains its client's scalars; those of a block are still without noise.
        if reply.content is None:
            block = self.without_failed(self.summing.checked(block))
        assert block.rows is not None
        total = self.sum_on(block.rows.device).total
        shares = _sent(block) if reply.content is not None else self.shares_of(block).values()
        usable = add_shares(total, shares, asked=self.share_request.parts)
        # That its row was not finite, a client says itself; otherwise its share is impossible.
        self.tally.doubt(block.client_ids, usable, "malformed")
        self.tally.doubt(block.client_ids, shares.usable, "non-finite")
        return replace(reply, block=replace(block, rows=None, usable=usable))


def _sent(block: Block) -> Shares:
    """The shares that a message brought."""
    assert block.rows is not None
    sides = {
        name.removeprefix(SIDE_PREFIX): torch.from_numpy(values)
        for name, values in block.metrics.items()
        if name.startswith(SIDE_PREFIX)
    }
    return Shares(block.rows, sides, torch.from_numpy(block.metrics[USABLE] > 0))


def add_shares(total: PartialSum, shares: Shares, *, asked: int = 1) -> Tensor:
    """Add shares to the one sum; which of them are usable, bool ``[n]``.

    A share counts in all its vectors and scalars or in none: only then is one top-up right
    for all of them. One that its bound and noise cannot have made is dropped like one that
    is not finite: beyond C by more than `FARTHEST` standard deviations s in one entry, or in
    norm by more than ``s (sqrt(d) + sqrt(2 FARTHEST))``, which the norm of d normal draws
    exceeds with probability ``e^-FARTHEST`` at most (Laurent and Massart 2000, lemma 1).

    Parameters
    ----------
    total : PartialSum
    shares : Shares
    asked : int
        Number of clients asked in this round: each adds noise of variance ``z^2 C^2 / asked``.
    """
    device, split = total.terms.device, total.terms.split
    rows = DenseRows(shares.rows.to(device, torch.float64))
    masks = RowMasks(shares.usable.shape, device)
    masks.usable &= shares.usable.to(device)
    missing = torch.full(shares.usable.shape, torch.nan)
    grids = summed_grids(total)
    sent = {
        segment.prefix + "sum": segment.part_of(rows).dense() for segment in total.terms.segments
    }
    for name in grids.keys() - sent.keys():
        sent[name] = shares.sides.get(name, missing).to(device, torch.float64)[:, None]
    for name, vectors in sent.items():
        radius, unit = grids[name].radius, grids[name].unit
        std = radius * share_multiplier(split[name], asked)
        root = math.sqrt(vectors.shape[1])
        # Noise is rounded to the grid. NaN is not below anything.
        entry = radius + std * FARTHEST + unit
        norm = radius + std * (root + math.sqrt(2 * FARTHEST)) + unit * root
        masks.usable &= torch.maximum(vectors.amax(1), -vectors.amin(1)) <= entry
        masks.usable &= torch.linalg.vector_norm(vectors, dim=1) <= norm
    total.expect(int(masks.usable.sum()))
    for name, vectors in sent.items():
        grids[name].add_(vectors[masks.usable] / grids[name].unit)
    masks.rejected |= ~masks.usable
    total.note(masks)
    return masks.usable
