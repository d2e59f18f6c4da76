"""Aggregations of shares: the server adds up rows that clients have bounded and noised.

The server adds the noise that missing clients would have added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from flwr.app import ConfigRecord, Message
from torch import Tensor

from fedsim.federation.aggregation.server_sum import ServerSum
from fedsim.federation.aggregation.shares import (
    SHARE_ARRAY,
    STATE_RECORD,
    USABLE,
    ShareRequest,
    Shares,
    make_shares,
    missing_share,
    share_multiplier,
    share_sizes,
    share_source,
    split,
)
from fedsim.federation.arrays import array_record
from fedsim.federation.replies import Reply, read_replies
from fedsim.mechanisms import PartialSum
from fedsim.privacy.placement import NoiseShares
from fedsim.rows.block import Block
from fedsim.rows.exact import RowMasks

# Limit, in standard deviations of the noise, on how far a share may exceed its bound. An honest
# share exceeds it with probability below 1e-300 in one entry, and e^-40 = 4e-18 in norm.
MAX_DEVIATIONS = 40.0


class ShareSum(ServerSum):
    """Base of aggregations of shares: requests them, or makes those of clients in this process."""

    sums_on_workers: ClassVar[bool] = False
    charged_before_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        release, plan = self.settings.randomness.release or "", self.plan
        assert isinstance(plan.placement, NoiseShares)
        self.share_count = plan.placement.share_count(self.summing.asked)
        self.share_request = ShareRequest(
            plan.mechanism, plan.noise, plan.denominator, self.share_count, release
        )
        self._bounding = plan.mechanism.bounding_state(self.state, self.summing.layout)
        self.instructions = replace(
            self.instructions,
            config=ConfigRecord({**self.instructions.config, **self.share_request.entries()}),
            records={STATE_RECORD: array_record(self._bounding)},
        )

    def shares_of(self, block: Block) -> Shares:
        """The shares that a block's clients would send, with the same noise draws."""
        assert block.rows is not None
        randomness, number = self.settings.randomness, self.instructions.round
        hardened = self.plan.noise.hardened
        return make_shares(
            self.share_request,
            block.rows,
            self._bounding,
            self.summing.layout,
            sources=[
                share_source(randomness, number, client, hardened=hardened)
                for client in block.client_ids.tolist()
            ],
            side_scalars=self.summing.side_scalars(block),
        )


class ClientShares(ShareSum):
    """Each sampled client sends its bounded row with noise of variance ``z^2 C^2 / asked``.

    The server adds the noise that missing clients would have added, so that the total is the same.
    """

    @property
    def missing_noise(self) -> float:
        """That of the shares that are missing."""
        return missing_share(self.share_count, self.total.count)

    def read(self, messages: Iterable[Message]) -> Iterator[Reply]:
        """Decode messages; they must have a share, and the flag whether its row was finite."""
        share = SHARE_ARRAY, sum(share_sizes(self.total).values())
        return read_replies(messages, self.instructions, self.tally, needed=(USABLE,), units=share)

    def add(self, reply: Reply) -> Reply:
        """Add the clients' shares; return the reply with ``usable`` set."""
        block = reply.block
        if reply.content is None:  # a block has rows without noise, and exact scalars
            block = self.without_failed(self.summing.mark_invalid(block))
            shares = self.shares_of(block)
        else:
            assert block.rows is not None
            shares = Shares(block.rows, torch.from_numpy(block.metrics[USABLE] > 0))
        total = self.sum_on_device(shares.units.device)
        usable = add_shares(total, shares, asked=self.share_count)
        # An unusable share is "malformed", unless its client itself reports a non-finite row: the
        # second line overrides the first.
        self.tally.reject_later(block.client_ids, usable, "malformed")
        self.tally.reject_later(block.client_ids, shares.usable, "non-finite")
        return replace(reply, block=replace(block, rows=None, usable=usable))


def add_shares(total: PartialSum, shares: Shares, *, asked: int = 1) -> Tensor:
    """Add shares to the sum; return which of them are usable, bool ``[n]``.

    A share enters with all its vectors and scalars or with none: the server adds missing noise by
    one count of shares, which must be right for all of them. A share is dropped if it is not
    finite, or if it is implausible for its bound and noise: above C by more than `MAX_DEVIATIONS`
    standard deviations s in one entry, or in norm by more than ``s (sqrt(d) + sqrt(2 t))`` with t
    the same number, which the norm of d normal draws exceeds with probability at most ``e^-t``
    (Laurent and Massart 2000, lemma 1).

    Parameters
    ----------
    total : PartialSum
    shares : Shares
    asked : int
        Number of clients asked in this round: each adds noise of variance ``z^2 C^2 / asked``.
    """
    device = total.definition.device
    masks = RowMasks(shares.usable.shape, device)
    masks.usable &= shares.usable.to(device)
    parts = split(total, shares.units.to(device))
    for name, vectors in parts.items():
        grid, root = total.grids[name], math.sqrt(vectors.shape[1])
        radius = grid.radius / grid.unit
        std = radius * share_multiplier(total.definition.split[name], asked)
        # One unit more, since noise is rounded to the grid. `<=` is False for NaN, as it must be.
        entry = radius + std * MAX_DEVIATIONS + 1
        norm = radius + std * (root + math.sqrt(2 * MAX_DEVIATIONS)) + root
        masks.usable &= torch.maximum(vectors.amax(1), -vectors.amin(1)) <= entry
        masks.usable &= torch.linalg.vector_norm(vectors, dim=1) <= norm
    total.expect(int(masks.usable.sum()))
    for name, vectors in parts.items():
        total.grids[name].add_(vectors[masks.usable])
    masks.rejected |= ~masks.usable
    total.count_rows(masks)
    return masks.usable
