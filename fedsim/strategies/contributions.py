"""From a round's replies to a mechanism's sum, each client of the cohort at most once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor

from fedsim.engines.arrays import array_record
from fedsim.errors import FedsimError
from fedsim.mechanisms import Accumulator, Mechanism, NoiseSource, Shares, State
from fedsim.privacy import Event
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import DenseRows, Layout
from fedsim.rows.exchange import Block, Ids, Replies
from fedsim.strategies.replies import blocks_from_messages
from fedsim.training.shares import SIDE_PREFIX, STATE_RECORD, USABLE

__all__ = ["Asked", "Contributions", "Placement"]

Floats = npt.NDArray[np.float64]
Placement = Literal["server", "client"]


@dataclass(frozen=True)
class Asked:
    """A round that has been configured and not yet aggregated.

    Attributes
    ----------
    cohort : int64 ``[m]``
        Everybody drawn, whether or not they were there to be asked.
    client_of : mapping of node id to client id
        Those who were asked.
    server : mapping of name to Tensor
        The global parameters, entries that are not trained included.
    vector : Tensor ``[d]``
    event : Event
        What the release will cost.
    """

    round: int
    cohort: Ids
    client_of: dict[int, int]
    server: dict[str, Tensor]
    vector: Tensor
    event: Event


@dataclass(frozen=True)
class Contributions:
    """Adds blocks to a sum, bounded by the server or by the clients themselves.

    On fedsim's engines in this process, clients' shares are made here, from the draws that
    each client would have used; Flower's clients send them.
    """

    mechanism: Mechanism
    noise_multiplier: float
    denominator: float
    placement: Placement
    randomness: Randomness
    hardened: bool
    weighted_by_key: str
    arrayrecord_key: str

    def blocks(self, asked: Asked, replies: Iterable[Message], layout: Layout) -> Iterator[Block]:
        """Blocks without failures, each client of the cohort at most once."""
        if isinstance(replies, Replies):
            blocks = replies.blocks()
        else:
            blocks = blocks_from_messages(
                replies,
                asked.client_of,
                layout,
                asked.vector,
                self.arrayrecord_key,
                shares=self.placement == "client",
            )
        waiting = set(asked.client_of.values())
        for block in blocks:
            keep = block.ok.copy()
            for index, client in enumerate(block.client_ids.tolist()):
                keep[index] &= client in waiting
                waiting.discard(client)
            if keep.any():
                yield block if keep.all() else block.select(keep)

    def start(
        self, asked: Asked, replies: Iterable[Message], layout: Layout, state: State
    ) -> tuple[Accumulator, Iterator[Block]]:
        """An empty sum on the device that rows come on, a GPU if need be; and the blocks."""
        blocks = self.blocks(asked, replies, layout)
        first = next(blocks, None)
        own = asked.vector if first is None or first.rows is None else first.rows
        total = self.mechanism.accumulate(state, layout, device=own.device)
        return total, chain([] if first is None else [first], blocks)

    def add(self, total: Accumulator, asked: Asked, block: Block, state: State) -> Tensor:
        """Add a block's rows, or its clients' shares; which of them are usable, bool ``[n]``."""
        assert block.rows is not None
        if self.placement == "server":
            rows = DenseRows(block.rows)
            return total.add(rows, weights=self._weights(block), sides=self._sides(block))
        shares = self._sent(block) if USABLE in block.metrics else self._made(asked, block, state)
        total.add_shares(shares)
        return shares.usable

    def noise(self, purpose: Purpose, server_round: int, client: int = 0) -> NoiseSource:
        """The noise of a round: the server's, or one client's."""
        generator = self.randomness.generator(
            purpose, level="client", round=server_round, client=client
        )
        return NoiseSource(generator, hardened=self.hardened)

    def request(
        self, asked: int, state: State
    ) -> tuple[dict[str, float | int | str], dict[str, ArrayRecord]]:
        """What to tell clients that noise their own rows: config entries and records."""
        if self.placement == "server":
            return {}, {}
        entries: dict[str, float | int | str] = {
            "share-noise-multiplier": self.noise_multiplier,
            "share-denominator": self.denominator,
            "share-asked": asked,
            "share-hardened": self.hardened,
            "share-release": self.randomness.release or "",
        }
        return entries, {STATE_RECORD: array_record(state)}

    def _made(self, asked: Asked, block: Block, state: State) -> Shares:
        assert block.rows is not None
        return self.mechanism.share(
            block.rows,
            state,
            noise_multiplier=self.noise_multiplier,
            denominator=self.denominator,
            asked=len(asked.client_of),
            noise=[
                self.noise(Purpose.SHARE, asked.round, client)
                for client in block.client_ids.tolist()
            ],
            sides=self._sides(block),
        )

    def _sent(self, block: Block) -> Shares:
        assert block.rows is not None
        sides = {
            name.removeprefix(SIDE_PREFIX): torch.from_numpy(values)
            for name, values in block.metrics.items()
            if name.startswith(SIDE_PREFIX)
        }
        return Shares(block.rows, sides, torch.from_numpy(block.metrics[USABLE] > 0))

    def _sides(self, block: Block) -> dict[str, Floats]:
        return {name: _reported(block, name) for name in self.mechanism.side_names}

    def _weights(self, block: Block) -> Floats | None:
        if self.mechanism.weighting != "num-examples":
            return None
        return _reported(block, self.weighted_by_key)


def _reported(block: Block, name: str) -> Floats:
    if name not in block.metrics:
        raise FedsimError(f"clients report no '{name}', which the mechanism or its weights need.")
    return block.metrics[name]
