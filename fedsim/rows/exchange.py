"""What a strategy and an engine say to each other.

A strategy hands `Instructions` to a Flower `Grid`. To any Grid they are an iterable of
Flower messages, made only as somebody iterates over them. An engine that knows fedsim
takes them whole, trains the clients in blocks and gives `Replies`, which in turn are an
iterable of messages to any strategy that asks for no more.

Where the server keeps the mean of the clients' state, the entry `CLIENT_STATE` of the
instructions' config says so, ``client-state.NAME`` is that mean once there is one, and each
client has what it ended with among its metrics by the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

__all__ = ["CLIENT_STATE", "Block", "BlockTrainer", "Instructions", "Kind", "Replies"]

CLIENT_STATE = "client-state"

Kind = Literal["train", "evaluate"]
Ids = npt.NDArray[np.int64]
NodeIds = npt.NDArray[np.uint64]
"""Flower's node ids use all 64 bits."""


@dataclass(frozen=True)
class Block:
    """What ``n`` clients send back.

    Attributes
    ----------
    client_ids : int64 ``[n]``
    rows : Tensor ``[n, d]`` or None
        Updates ``w_client - w_global`` in the layout's order; None for an evaluation.
    metrics : mapping of name to float64 ``[n]``
        What each client reports: ``num-examples``, ``loss``, ``accuracy`` and whatever else
        the algorithm does.
    ok : bool ``[n]``
        False for a client that failed; its row and metrics mean nothing.
    """

    client_ids: Ids
    rows: Tensor | None
    metrics: Mapping[str, npt.NDArray[np.float64]]
    ok: npt.NDArray[np.bool_]

    def select(self, keep: npt.NDArray[np.bool_]) -> Block:
        """The clients for which ``keep [n]`` holds."""
        return Block(
            client_ids=self.client_ids[keep],
            rows=None if self.rows is None else self.rows[torch.from_numpy(keep)],
            metrics={name: values[keep] for name, values in self.metrics.items()},
            ok=self.ok[keep],
        )


class BlockTrainer(Protocol):
    """A client algorithm with its clients' data, over blocks of clients.

    Both methods yield blocks in the order of ``client_ids``, each no larger than memory or
    cache wants, and compute nothing before they are iterated.
    """

    @property
    def population(self) -> int:
        """Number of clients; their ids are 0 .. population - 1."""

    def train(self, vector: Tensor, client_ids: Ids, round: int) -> Iterator[Block]:
        """Local work of these clients from the global parameters ``vector [d]``."""

    def evaluate(self, vector: Tensor, client_ids: Ids, round: int) -> Iterator[Block]:
        """Loss and accuracy of ``vector [d]`` on these clients' data."""


@dataclass(frozen=True)
class Instructions(Iterable[Message]):
    """One round's messages, not yet made.

    Attributes
    ----------
    kind : "train" or "evaluate"
    round : int
    arrays : ArrayRecord
        The global parameters, as Flower sends them.
    vector : Tensor ``[d]``
        The same parameters (floating entries only) in the layout's order.
    client_ids, node_ids : int64 and uint64 ``[n]``
        Who is asked: clients by their ids, and the Flower node each of them is.
    config : ConfigRecord
        Goes with every message.
    records : mapping of name to ArrayRecord
        Further arrays that go with every message.
    """

    kind: Kind
    round: int
    arrays: ArrayRecord
    vector: Tensor
    client_ids: Ids
    node_ids: NodeIds
    config: ConfigRecord
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    records: Mapping[str, ArrayRecord] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.client_ids)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    @cached_property
    def _messages(self) -> list[Message]:
        # Kept: Flower's HttpGrid goes over the messages twice, and sets their ids the first
        # time.
        return [self._message(node_id) for node_id in self.node_ids.tolist()]

    def _message(self, node_id: int) -> Message:
        # Each client gets records of its own: one that empties its payload must not empty its
        # neighbours'. The arrays inside are shared; ArrayRecord(dict) would serialise every
        # one that is kept as a tensor.
        content = RecordDict({self.configrecord_key: ConfigRecord(dict(self.config))})
        for key, record in {self.arrayrecord_key: self.arrays, **self.records}.items():
            content[key] = _same_arrays(record)
        return Message(content, node_id, self.kind)


def _same_arrays(record: ArrayRecord) -> ArrayRecord:
    own = ArrayRecord()
    for name, array in record.items():
        own[name] = array
    return own


@dataclass
class Replies(Iterable[Message]):
    """Replies to `Instructions`, as blocks or as Flower messages; consumed once.

    Attributes
    ----------
    produce : callable returning an iterator of blocks
    to_messages : callable turning one block into Flower messages
    """

    produce: Callable[[], Iterator[Block]]
    to_messages: Callable[[Block], Iterator[Message]]
    _blocks: Iterator[Block] | None = field(default=None, init=False, repr=False)

    def blocks(self) -> Iterator[Block]:
        """Blocks as they come; clients are trained as the iterator advances."""
        if self._blocks is None:
            self._blocks = self.produce()
        return self._blocks

    def __iter__(self) -> Iterator[Message]:
        for block in self.blocks():
            yield from self.to_messages(block)

    def drain(self) -> None:
        """Finish whatever was not consumed, and drop it."""
        for _ in self.blocks():
            pass
