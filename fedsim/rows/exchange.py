"""What a strategy and an engine exchange.

A strategy hands `Instructions` to a Flower `Grid`. To any Grid they are an iterable of
Flower messages, made only as they are iterated over. An engine that knows fedsim
takes them whole, trains the clients in blocks and gives `Replies`, which in turn are an
iterable of messages to any strategy that asks for no more.

Where the server keeps the mean of the clients' state, the entry `CLIENT_STATE` of the
instructions' config says so, ``client-state.NAME`` is that mean once there is one, and each
client has what it ended with among its metrics by the same name.

Where clients keep their own state on the disk, the entry `KEEP_SINCE` says to the end of which
round the run may go back: what a client had then, and since, stays.

In a run that protects anything, the entry `RUN` names it: the same for all rounds of one run, also
once it is resumed, and another for every other run. By it clients know which rounds they have gone
through before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from fedsim.rows.block import Block, Ids

CLIENT_STATE = "client-state"
KEEP_SINCE = "keep-since"
RUN = "run"
DECLARED_EXAMPLES = "declared-examples"
"""How many examples a client is declared to have, where its update is weighed by that."""

MessageType = Literal["train", "evaluate"]
NodeIds = npt.NDArray[np.uint64]
"""Flower's node ids use all 64 bits."""


@dataclass(frozen=True)
class Instructions(Iterable[Message]):
    """One round's messages, not yet made.

    Attributes
    ----------
    message_type : "train" or "evaluate"
    round : int
    arrays : ArrayRecord
        The global parameters, as Flower sends them.
    vector : Tensor ``[d]``
        The same parameters (floating entries only) in the layout's order.
    client_ids, node_ids : int64 and uint64 ``[n]``
        The sampled clients by their ids, and the Flower node that each of them is.
    config : ConfigRecord
        Goes with every message.
    records : mapping of name to ArrayRecord
        Further arrays that go with every message.
    numbers : mapping of name to sequence of int ``[n]``
        What differs between clients, in each message's config.
    """

    message_type: MessageType
    round: int
    arrays: ArrayRecord
    vector: Tensor
    client_ids: Ids
    node_ids: NodeIds
    config: ConfigRecord
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    records: Mapping[str, ArrayRecord] = field(default_factory=dict)
    numbers: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.client_ids)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    @cached_property
    def _messages(self) -> list[Message]:
        # Cached: Flower's HttpGrid goes over the messages twice, and sets their ids the first
        # time.
        return [self._message(*place) for place in enumerate(self.node_ids.tolist())]

    def _message(self, index: int, node_id: int) -> Message:
        # Each client gets records of its own: one that empties its payload must not empty its
        # neighbours'. The arrays inside are shared; ArrayRecord(dict) would serialise every
        # one that is kept as a tensor.
        config = ConfigRecord(dict(self.config))
        for name, values in self.numbers.items():
            config[name] = values[index]
        content = RecordDict({self.configrecord_key: config})
        for key, record in {self.arrayrecord_key: self.arrays, **self.records}.items():
            content[key] = _same_arrays(record)
        return Message(content, node_id, self.message_type)


def _same_arrays(record: ArrayRecord) -> ArrayRecord:
    shells = ArrayRecord()
    for name, array in record.items():
        shells[name] = array
    return shells


Sums = Mapping[str, Tensor]
"""What `BlockSum.state` gives; merging sums of one round is exact in any order and tree."""


class BlockSum(Protocol):
    """Where the rows of blocks are bounded and summed."""

    def add(self, block: Block) -> Block:
        """Add a block's rows; the block with ``usable`` in their place."""

    def state(self) -> Sums:
        """All that was added."""


class Summing(Protocol):
    """How a round's rows are bounded and summed; a value that travels to the workers."""

    def start(self, device: torch.device) -> BlockSum:
        """An empty sum, for rows that come on ``device``."""


@dataclass(frozen=True)
class Collection:
    """What a strategy asks of an engine whose workers bound and sum what they train.

    Attributes
    ----------
    summing : Summing
        Goes to the workers.
    merge : callable
        Takes each worker's sum. A block is given only once the sum that has its rows was taken.
    """

    summing: Summing
    merge: Callable[[Sums], None]


@dataclass
class Replies(Iterable[Message]):
    """Replies to `Instructions`, as blocks or as Flower messages; consumed once.

    Attributes
    ----------
    produce : callable returning an iterator of blocks
        Without a `Collection` they have rows.
    to_messages : callable turning one block into Flower messages
    sums : bool
        Whether ``produce`` takes a `Collection`.
    """

    produce: Callable[[Collection | None], Iterator[Block]]
    to_messages: Callable[[Block], Iterator[Message]]
    sums: bool = False
    _blocks: Iterator[Block] | None = field(default=None, init=False, repr=False)

    def blocks(self, collection: Collection | None = None) -> Iterator[Block]:
        """Blocks as they come; clients are trained as the iterator advances."""
        if self._blocks is None:
            self._blocks = self.produce(collection)
        return self._blocks

    def __iter__(self) -> Iterator[Message]:
        for block in self.blocks():
            yield from self.to_messages(block)

    def drain(self) -> None:
        """Finish what was not consumed, and drop it."""
        for _ in self.blocks():
            pass
