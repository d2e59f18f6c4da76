"""The instructions and replies that a strategy and an engine exchange.

A strategy sends `Instructions` over a Flower `Grid`. For any Grid they are an iterable of Flower
messages, which are created only when iterated over. fedsim's own engines recognise them, train the
clients in blocks and return `Replies`, which in turn are an iterable of messages for a strategy
that does not recognise them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedsim.array_types import Ints
from fedsim.federation.arrays import array_record, same_arrays, tensors, to_arrays
from fedsim.federation.flower_internals import (
    BUDGET_SPENT,
    CLIENT_RAISED,
    MALFORMED,
    NON_FINITE,
    TIMED_OUT,
    error_reply,
)
from fedsim.federation.row_sums import Summing
from fedsim.mechanisms import PartialSum
from fedsim.rows.block import Block, Reason
from fedsim.rows.layout import Layout

ERROR_CODES: Mapping[Reason, int] = {
    "raised": CLIENT_RAISED,
    "budget": BUDGET_SPENT,
    "timeout": TIMED_OUT,
    "malformed": MALFORMED,
    "non-finite": NON_FINITE,
}
"""Error code of the reply of a client that failed for a reason; a missing one sends no reply."""

MessageType = Literal["train", "evaluate"]
NodeIds = npt.NDArray[np.uint64]
"""Flower's node ids use all 64 bits."""


@dataclass(frozen=True)
class RecordKeys:
    """Names of the records in messages, and of the metric that weights clients."""

    weighted_by: str = "num-examples"
    arrays: str = "arrays"
    config: str = "config"


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

    client_ids: Ints
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
        The global parameters, and any named vectors after them, as Flower sends them.
    vector : Tensor ``[k]``
        Their floating-point entries, flattened. A row is a difference from the first d of them.
    recipients : Recipients
    config : ConfigRecord
        Sent with every message.
    layout : Layout or None
        Layout of a row ``[d]``; None for an evaluation, whose replies have no rows.
    keys : RecordKeys
    records : mapping of name to ArrayRecord
        Further arrays sent with every message.
    numbers : mapping of name to sequence of int ``[n]``
        Config entries that differ between clients, one number a client.
    summing : Summing, optional
        If given, workers may bound and add up the rows, and then do not send them.
    """

    message_type: MessageType
    round: int
    arrays: ArrayRecord
    vector: Tensor
    recipients: Recipients
    config: ConfigRecord
    layout: Layout | None = None
    keys: RecordKeys = field(default_factory=RecordKeys)
    records: Mapping[str, ArrayRecord] = field(default_factory=dict)
    numbers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    summing: Summing | None = None

    def __len__(self) -> int:
        return len(self.recipients.client_ids)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    def for_workers(self, *, sum_rows: bool) -> Instructions:
        """The part that trainers in other processes need; the rest is only for messages."""
        nobody = Recipients(np.empty(0, np.int64), np.empty(0, np.uint64))
        return replace(
            self,
            arrays=ArrayRecord(),
            # On the CPU for any device: it is sent by shared memory or Ray.
            vector=self.vector.detach().cpu(),
            recipients=nobody,
            records={},
            numbers={},
            summing=self.summing if sum_rows else None,
        )

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


class Exchange(Iterable[Message]):
    """A round's messages that are sent and answered one by one, not all at once.

    `run_to_end` calls `over`; whoever iterates over it without is refused.
    """

    @abstractmethod
    def over(self, grid: Grid, timeout: float | None) -> Iterable[Message]:
        """The replies: as they are iterated over, messages are sent over the grid and received.

        Parameters
        ----------
        timeout : float or None
            Seconds that a client may take.
        """


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
    produce: Callable[[PartialSum | None], Iterator[Block]]
    sums: bool = False
    _blocks: Iterator[Block] | None = field(default=None, init=False, repr=False)

    def blocks(self, into: PartialSum | None = None) -> Iterator[Block]:
        """Iterator over the blocks; clients are trained as it advances."""
        if self._blocks is None:
            self._blocks = self.produce(into)
        return self._blocks

    def __iter__(self) -> Iterator[Message]:
        for block in self.blocks():
            yield from messages_of(self.instructions, block)


def messages_of(instructions: Instructions, block: Block) -> Iterator[Message]:
    """Flower replies of a block's clients, with their trained parameters and metrics."""
    node_of, layout = instructions.recipients.node_of, instructions.layout
    server = tensors(instructions.arrays)
    for index, client_id in enumerate(block.client_ids.tolist()):
        request = Message(RecordDict(), node_of[client_id], instructions.message_type)
        if (reason := block.reasons.get(client_id)) is not None:
            if (code := ERROR_CODES.get(reason)) is not None:
                yield error_reply(request, code, f"client {client_id} failed: {reason}")
            continue
        content = RecordDict()
        if block.rows is not None and layout is not None:
            trained = instructions.vector[: layout.d] + block.rows[index]
            content[instructions.keys.arrays] = array_record(to_arrays(trained, layout, server))
        reported = {name: float(values[index]) for name, values in block.metrics.items()}
        content["metrics"] = metric_record(reported)
        yield Message(content, reply_to=request)


def metric_record(reported: Mapping[str, float]) -> MetricRecord:
    """Metric record of a client; its number of examples is an int, as from Flower's clients."""
    counts = {name: int(value) for name, value in reported.items() if name == "num-examples"}
    return MetricRecord({**reported, **counts})
