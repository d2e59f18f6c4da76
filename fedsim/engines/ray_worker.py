"""What a Ray worker runs, and how blocks and states travel to it and back.

Ray ships numpy arrays out of band, and tensors by pickling them. What comes out of its object
store is copied: it is read-only, and pins memory there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsim.engines.blocks import guarded_blocks
from fedsim.engines.parcel import Parcel
from fedsim.engines.process import settle
from fedsim.rows.exchange import Block, BlockTrainer, ClientStates, Ids, MessageType, Reason

__all__ = [
    "Arrays",
    "Wire",
    "WorkerTraining",
    "from_wire",
    "to_arrays",
    "to_tensors",
    "to_wire",
]

Arrays = dict[str, npt.NDArray[Any]]
Wire = tuple[Ids, npt.NDArray[Any] | None, Arrays, npt.NDArray[np.bool_], dict[int, Reason]]
"""A block's fields, its rows as an array."""


class WorkerTraining:
    """What runs in a worker process."""

    def __init__(self, parcel: Parcel, device: str) -> None:
        settle()
        self._device = device
        self._trainer: BlockTrainer = parcel.unpack().copy_for(device)

    def ready(self) -> None:
        """Reply, once the process has started."""

    def work(
        self,
        message_type: MessageType,
        vector: np.ndarray[Any, Any],
        client_ids: Ids,
        round: int,
        config: Mapping[str, object],
        states: Arrays,
    ) -> tuple[list[Wire], Arrays]:
        """Blocks of these clients, and what they keep afterwards; they are lent ``states``."""
        here: Tensor = torch.from_numpy(np.array(vector)).to(self._device)
        ids = np.array(client_ids)
        # The driver keeps what clients keep: whichever worker has them next is lent it.
        self._trainer.restore(to_tensors(states))
        if message_type == "train":
            self._trainer.receive(config)
        blocks = guarded_blocks(self._trainer, message_type, here, ids, round)
        replies = [to_wire(block) for block in blocks]
        return replies, to_arrays(self._trainer.state(ids)) if message_type == "train" else {}


def to_arrays(states: ClientStates) -> Arrays:
    """What clients keep, as numpy arrays."""
    return {name: values.cpu().numpy() for name, values in states.items()}


def to_tensors(states: Arrays) -> ClientStates:
    """And back, in memory of this process."""
    return {name: torch.from_numpy(np.array(values)) for name, values in states.items()}


def to_wire(block: Block) -> Wire:
    """A block as a reply takes it."""
    rows = None if block.rows is None else block.rows.detach().cpu().numpy()
    return block.client_ids, rows, dict(block.metrics), block.ok, dict(block.reasons)


def from_wire(wire: Wire) -> Block:
    """And back, in memory of this process."""
    client_ids, rows, metrics, ok, reasons = wire
    return Block(
        client_ids=np.array(client_ids),
        rows=None if rows is None else torch.from_numpy(np.array(rows)),
        metrics={name: np.array(values) for name, values in metrics.items()},
        ok=np.array(ok),
        reasons=reasons,
    )
