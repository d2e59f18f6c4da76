"""Aggregation of shares: clients bound and noise their own rows, and the server adds them up.

The strategy says with what noise (``share-*`` entries of the message's config), and what of the
mechanism's state it takes to bound a row (an array record named `STATE_RECORD`); the client
bounds and noises its row and replies that, an array record with the one entry ``share``, and
nothing else about its data. Clients of fedsim's engines in this process make no messages: their
shares are made here, from the draws that each client would have used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedsim.federation.aggregation.base import Placement
from fedsim.federation.aggregation.server_sum import ServerSum
from fedsim.federation.aggregation.shares import ShareRequest, Shares, add_shares, share
from fedsim.federation.arrays import array_record
from fedsim.federation.replies import SHARE, ExpectedReply, Reply
from fedsim.mechanisms import Mechanism, NoiseSource
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import Layout
from fedsim.rows.block import Block, Reason
from fedsim.rows.exchange import Instructions

STATE_RECORD = "mechanism-state"
USABLE = "share-usable"
SIDE_PREFIX = "share-side."


class ClientShares(ServerSum):
    """Each client asked sends its bounded row with noise of variance ``z^2 C^2 / asked``.

    What missing clients would have added the server adds, so that the total is the same.
    """

    placement: ClassVar[Placement] = "client"
    on_workers: ClassVar[bool] = False

    def request(self, instructions: Instructions) -> Instructions:
        """The round's instructions, the noise of a share, and the state that bounds a row."""
        asked = super().request(instructions)
        bounding = self.plan.bound.bounding_state(self.pending.state, self.pending.layout)
        return replace(
            asked,
            config=ConfigRecord({**asked.config, **self._share_request().entries()}),
            records={STATE_RECORD: array_record(bounding)},
        )

    def _share_request(self) -> ShareRequest:
        release = self.settings.randomness.release or ""
        return ShareRequest.of_plan(self.plan, self.shares_asked, release)

    def expected(self) -> ExpectedReply:
        """A share, and whether its row was finite."""
        return replace(super().expected(), shares=True, needed=(USABLE,))

    def unsound(self, reply: Reply) -> dict[int, Reason]:
        """A share has its client's scalars in it; those of a block are still bare."""
        return super().unsound(reply) if reply.content is None else {}

    def add(self, reply: Reply) -> Tensor:
        """Add the clients' shares; which of them are usable, bool ``[n]``."""
        block = reply.block
        assert block.rows is not None
        total = self.total_on(block.rows.device)
        shares = self._made(block) if reply.content is None else _sent(block)
        usable = add_shares(total, shares, asked=self.shares_asked)
        # That its row was not finite a client says; anything else its share cannot be.
        self.tally.doubt(block.client_ids, usable, "malformed")
        self.tally.doubt(block.client_ids, shares.usable, "non-finite")
        return usable

    def _made(self, block: Block) -> Shares:
        assert block.rows is not None
        layout, sources = self.releaser.layout, self.settings.noise_source
        return share(
            self._share_request(),
            block.rows,
            self.plan.bound.bounding_state(self.total.before, layout),
            layout,
            sources=[
                sources(Purpose.SHARE, self.pending.round, client)
                for client in block.client_ids.tolist()
            ],
            sides=self.weighing.sides(block),
        )

    @property
    def shares_asked(self) -> int:
        """How many clients were asked; of those who sent nothing the server adds the noise."""
        return len(self.pending.client_ids)


def _sent(block: Block) -> Shares:
    """The shares that a message brought."""
    assert block.rows is not None
    sides = {
        name.removeprefix(SIDE_PREFIX): torch.from_numpy(values)
        for name, values in block.metrics.items()
        if name.startswith(SIDE_PREFIX)
    }
    return Shares(block.rows, sides, torch.from_numpy(block.metrics[USABLE] > 0))


def asks_for_share(message: Message) -> ConfigRecord | None:
    """The config record that asks for a share, if there is one."""
    for record in message.content.config_records.values():
        if "share-asked" in record:
            return record
    return None


def share_reply(
    mechanism: Mechanism,
    row: Tensor,
    layout: Layout,
    reported: dict[str, float],
    message: Message,
    request: ConfigRecord,
    randomness: Randomness,
    client: int,
) -> RecordDict:
    """Content of the reply.

    Parameters
    ----------
    row : Tensor ``[d]``
        The client's update, in this layout.
    reported : mapping of name to float
        From which the mechanism's side scalars are taken; the rest stays here.
    randomness : Randomness
        Where the client's noise comes from.
    """
    bounding = message.content.array_records[STATE_RECORD].to_torch_state_dict()
    asked = ShareRequest.read(request, mechanism)
    # Of the strategy's release: an engine in its process would have made the same share.
    generator = Randomness(randomness.seed, asked.release or None).generator(
        Purpose.SHARE, level="client", round=_whole(request, "server-round"), client=client
    )
    shares = share(
        asked,
        row.unsqueeze(0),
        bounding,
        layout,
        sources=[NoiseSource(generator, hardened=asked.noise.hardened)],
        sides={name: np.array([reported[name]]) for name in mechanism.side_names},
    )
    metrics = {f"{SIDE_PREFIX}{name}": float(value[0]) for name, value in shares.sides.items()}
    return RecordDict(
        {
            "arrays": ArrayRecord({SHARE: Array(shares.rows[0].cpu().numpy())}),
            "metrics": MetricRecord({USABLE: int(shares.usable[0]), **metrics}),
        }
    )


def _whole(request: ConfigRecord, key: str) -> int:
    value = request[key]
    if not isinstance(value, int):
        raise ValueError(f"the message's {key} is {value!r}; it must be a whole number.")
    return value
