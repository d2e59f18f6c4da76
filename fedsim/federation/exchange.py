"""The instructions and replies that a strategy and an engine exchange.

A strategy sends `Instructions` over a Flower `Grid`. For any Grid they are an iterable of Flower
messages, which are created only when iterated over. fedsim's own engines recognise them, train the
clients in blocks and return `Replies`, which in turn are an iterable of messages for a strategy
that does not recognise them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedsim.federation.arrays import array_record, same_arrays, tensors
from fedsim.federation.flower_internals import ERROR_CODES, error_reply
from fedsim.federation.replies import RecordKeys, to_arrays
from fedsim.federation.row_sums import RowSum
from fedsim.rows.block import Block, Ids
from fedsim.rows.layout import Layout

MessageType = Literal["train", "evaluate"]
NodeIds = npt.NDArray[np.uint64]
"""Flower's node ids use all 64 bits."""


@dataclass(frozen=True)
class Recipients:
    """The clients that are sent messages in a round.

    Attributes
    ----------
    client_ids, node_ids : int64 and uint64 ``[a]``
        Sorted client ids, and the Flower node of each.
    absent : int
        Number of other clients that were sampled but are not available.
    """

    client_ids: Ids
    node_ids: NodeIds
    absent: int = 0

    @cached_property
    def client_of(self) -> dict[int, int]:
        """Client id of each node; computed only where messages are read."""
        return dict(zip(self.node_ids.tolist(), self.client_ids.tolist(), strict=True))

    @cached_property
    def node_of(self) -> dict[int, int]:
        """Node of each client id."""
        return dict(zip(self.client_ids.tolist(), self.node_ids.tolist(), strict=True))


@dataclass(frozen=True)
class Instructions(Iterable[Message]):
    """One round's messages, created only when they are iterated over.

    Attributes
    ----------
    message_type : "train" or "evaluate"
    round : int
    arrays : ArrayRecord
        The global parameters, as Flower sends them.
    vector : Tensor ``[d]``
        The same parameters (floating entries only) in the layout's order.
    recipients : Recipients
    config : ConfigRecord
        Sent with every message.
    keys : RecordKeys
    records : mapping of name to ArrayRecord
        Further arrays sent with every message.
    numbers : mapping of name to sequence of int ``[n]``
        Config entries that differ between clients, one number a client.
    row_size : int, optional
        Size of a row where clients send back only the first entries of the vector.
    """

    message_type: MessageType
    round: int
    arrays: ArrayRecord
    vector: Tensor
    recipients: Recipients
    config: ConfigRecord
    keys: RecordKeys = field(default_factory=RecordKeys)
    records: Mapping[str, ArrayRecord] = field(default_factory=dict)
    numbers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    row_size: int | None = None

    def __len__(self) -> int:
        return len(self.recipients.client_ids)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    @cached_property
    def _messages(self) -> list[Message]:
        # Cached: Flower's HttpGrid iterates over the messages twice, and sets their ids the first
        # time, so that both passes must see the same objects.
        return [self._message(*place) for place in enumerate(self.recipients.node_ids.tolist())]

    def _message(self, index: int, node_id: int) -> Message:
        # Each client gets its own records, since one that empties its payload must not empty that
        # of others. The arrays inside are shared.
        config = ConfigRecord(dict(self.config))
        for name, values in self.numbers.items():
            config[name] = values[index]
        content = RecordDict({self.keys.config: config})
        for key, record in {self.keys.arrays: self.arrays, **self.records}.items():
            content[key] = same_arrays(record)
        return Message(content, node_id, self.message_type)


@dataclass
class Replies(Iterable[Message]):
    """Replies to `Instructions`, as blocks or as Flower messages; consumed once.

    Attributes
    ----------
    instructions : Instructions
    produce : callable returning an iterator of blocks
        Its argument is the sum into which workers' sums are merged, or None where blocks keep their
        rows. It yields a block only after the sum that contains its rows was merged.
    sums : bool
        Whether workers bound and sum the rows that they train.
    """

    instructions: Instructions
    produce: Callable[[RowSum | None], Iterator[Block]]
    sums: bool = False
    _blocks: Iterator[Block] | None = field(default=None, init=False, repr=False)

    def blocks(self, into: RowSum | None = None) -> Iterator[Block]:
        """Iterator over the blocks; clients are trained as it advances."""
        if self._blocks is None:
            self._blocks = self.produce(into)
        return self._blocks

    def __iter__(self) -> Iterator[Message]:
        for block in self.blocks():
            yield from messages_of(self.instructions, block)

    def drain(self) -> None:
        """Train the clients whose blocks were not consumed, and drop the blocks."""
        for _ in self.blocks():
            pass


def messages_of(instructions: Instructions, block: Block) -> Iterator[Message]:
    """Flower replies of a block's clients, with their trained parameters and metrics."""
    node_of = instructions.recipients.node_of
    server = tensors(instructions.arrays)
    layout = Layout.of(server)
    if instructions.row_size is not None:  # clients send only the vector's first entries
        row = tuple(entry for entry in layout.entries if entry.stop <= instructions.row_size)
        layout = Layout(row, layout.untrained)
        named = {entry.name for entry in row}.union(layout.untrained)
        server = {name: tensor for name, tensor in server.items() if name in named}
    for index, client_id in enumerate(block.client_ids.tolist()):
        request = Message(RecordDict(), node_of[client_id], instructions.message_type)
        if (reason := block.reasons.get(client_id)) is not None:
            if (code := ERROR_CODES.get(reason)) is not None:
                yield error_reply(request, code, f"client {client_id} failed: {reason}")
            continue
        content = RecordDict()
        if block.rows is not None:
            trained = instructions.vector[: layout.d] + block.rows[index]
            content[instructions.keys.arrays] = array_record(to_arrays(trained, layout, server))
        reported = {name: float(values[index]) for name, values in block.metrics.items()}
        content["metrics"] = metric_record(reported)
        yield Message(content, reply_to=request)


def metric_record(reported: Mapping[str, float]) -> MetricRecord:
    """Metric record of a client; its number of examples is an int, as from Flower's clients."""
    counts = {name: int(value) for name, value in reported.items() if name == "num-examples"}
    return MetricRecord({**reported, **counts})
