"""Running a block trainer so that one client's failure stays its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedsim.engines.arrays import LazyArray, tensors
from fedsim.engines.memory import Transaction, memory_of
from fedsim.engines.messages import CLIENT_RAISED, error_reply
from fedsim.rows.exchange import Block, BlockTrainer, Ids, Instructions, Kind
from fedsim.training.trainer import Trainer

__all__ = ["failed_block", "guarded_blocks", "messages_of"]

log = logging.getLogger(__name__)


def guarded_blocks(
    trainer: BlockTrainer,
    kind: Kind,
    vector: Tensor,
    client_ids: Ids,
    round: int,
    *,
    deadline: float | None = None,
) -> Iterator[Block]:
    """Blocks of a trainer, in which clients that raise have failed and nobody else has.

    When a block raises, its clients are run one at a time until the one at fault is found;
    blocks go on after it. Clients do not depend on their neighbours, so those that succeed
    give the same bytes as they would have in the block, and what they keep for the next round
    is kept only with their replies.

    Parameters
    ----------
    deadline : float, optional
        Reading of `time.monotonic` after which no further client is started.

    Yields
    ------
    Block
        In the order of ``client_ids``.
    """
    memory = memory_of(trainer)
    if memory is None or not isinstance(trainer, Trainer):
        yield from _guarded(trainer, kind, vector, client_ids, round, deadline, None)
        return
    changes = trainer.memory = Transaction(memory)
    try:
        yield from _guarded(trainer, kind, vector, client_ids, round, deadline, changes)
    finally:
        trainer.memory = memory


def _guarded(
    trainer: BlockTrainer,
    kind: Kind,
    vector: Tensor,
    client_ids: Ids,
    round: int,
    deadline: float | None,
    changes: Transaction | None,
) -> Iterator[Block]:
    work = trainer.train if kind == "train" else trainer.evaluate
    position = 0
    alone = False
    while position < len(client_ids):
        if deadline is not None and time.monotonic() >= deadline:
            return
        asked = client_ids[position : position + 1] if alone else client_ids[position:]
        end = position + len(asked)
        try:
            for block in work(vector, asked, round):
                if changes is not None:
                    changes.commit()
                yield block
                position += len(block.client_ids)
                if deadline is not None and time.monotonic() >= deadline:
                    return
        except Exception:  # a client's code may raise anything
            if changes is not None:
                changes.discard()
            if not alone:
                alone = True
                continue
            log.warning("client %d failed in round %d", client_ids[position], round, exc_info=True)
            yield failed_block(client_ids[position : position + 1])
            position += 1
            alone = False
            continue
        if position < end:
            raise RuntimeError(f"{type(trainer).__name__} left out {end - position} clients")


def failed_block(client_ids: Ids) -> Block:
    """Block of clients that have all failed."""
    return Block(client_ids, None, {}, np.zeros(len(client_ids), dtype=np.bool_))


def messages_of(instructions: Instructions, block: Block) -> Iterator[Message]:
    """Flower replies of a block's clients: their own parameters and what they report."""
    node_of = dict(
        zip(instructions.client_ids.tolist(), instructions.node_ids.tolist(), strict=True)
    )
    shapes = tensors(instructions.arrays)
    for index, client_id in enumerate(block.client_ids.tolist()):
        request = Message(RecordDict(), node_of[client_id], instructions.kind)
        if not block.ok[index]:
            yield error_reply(request, CLIENT_RAISED, f"client {client_id} failed")
            continue
        content = RecordDict()
        if block.rows is not None:
            content[instructions.arrayrecord_key] = _parameters(
                shapes, instructions.vector + block.rows[index]
            )
        content["metrics"] = MetricRecord(
            {name: _scalar(name, values[index]) for name, values in block.metrics.items()}
        )
        yield Message(content, reply_to=request)


def _parameters(like: dict[str, Tensor], vector: Tensor) -> ArrayRecord:
    record = ArrayRecord()
    start = 0
    for name, tensor in like.items():
        if tensor.is_floating_point():
            stop = start + tensor.numel()
            part = vector[start:stop].reshape(tensor.shape).to(tensor.dtype)
            record[name] = LazyArray(part)
            start = stop
        else:
            record[name] = LazyArray(tensor)
    return record


def _scalar(name: str, value: np.float64) -> int | float:
    return int(value) if name == "num-examples" else float(value)
