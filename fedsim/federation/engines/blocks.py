"""Running a block trainer so that one client's failure stays its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedsim.errors import BudgetSpentError
from fedsim.federation.arrays import LazyArray, tensors
from fedsim.federation.flower_internals import BUDGET_SPENT, CLIENT_RAISED, error_reply
from fedsim.rows.block import Block, BlockTrainer, Ids, MalformedBlockError, Reason
from fedsim.rows.exchange import Instructions, MessageType

log = logging.getLogger(__name__)

SILENT: tuple[Reason, ...] = ("missing", "timeout")
"""Failures of which a Flower node says nothing."""


def guarded_blocks(
    trainer: BlockTrainer, message_type: MessageType, vector: Tensor, client_ids: Ids, round: int
) -> Iterator[Block]:
    """Blocks of a trainer, in which the clients that raise have failed and no others.

    When a block raises, or is not what was asked for, its clients are run one at a time until
    the one at fault is found, and then in blocks again. Clients do not depend on their neighbours,
    so those that succeed give the same bytes as they would have in the block.

    Yields
    ------
    Block
        In the order of ``client_ids``.
    """
    work = trainer.train if message_type == "train" else trainer.evaluate
    position = 0
    alone = False
    while position < len(client_ids):
        asked = client_ids[position : position + 1] if alone else client_ids[position:]
        end = position + len(asked)
        reason: Reason = "missing"
        detail = "there was no block of it"
        try:
            for block in work(vector, asked, round):
                _require_asked(block, message_type, vector, client_ids[position:end])
                yield block
                position += len(block.client_ids)
        # A client's code may raise anything, and `sys.exit` is one way to.
        except (Exception, SystemExit) as error:
            reason = _reason_of(error)
            detail = f"{type(error).__name__}: {error}"
            log.debug("clients %s in round %d", asked, round, exc_info=True)
        if position == end:
            continue
        if not alone:
            alone = True
            continue
        log.warning("client %d failed in round %d: %s", client_ids[position], round, detail)
        yield Block.failed(client_ids[position:end], reason)
        position += 1
        alone = False


def _reason_of(error: BaseException) -> Reason:
    if isinstance(error, BudgetSpentError):
        return "budget"
    return "malformed" if isinstance(error, MalformedBlockError) else "raised"


def _require_asked(block: Block, message_type: MessageType, vector: Tensor, asked: Ids) -> None:
    """Raise `MalformedBlockError` unless a block is of the clients and parameters asked for."""
    ids = block.client_ids
    if not len(ids) or not np.array_equal(ids, asked[: len(ids)]):
        raise MalformedBlockError(f"a block is of clients {ids}; asked next were {asked}.")
    if message_type == "evaluate":
        if block.rows is not None:
            raise MalformedBlockError("a block of an evaluation has rows; it must have none.")
    elif block.rows is None:
        if block.ok.any():
            raise MalformedBlockError("a block of trained clients has no rows.")
    elif block.rows.shape[1] != len(vector):
        raise MalformedBlockError(
            f"rows of a block have {block.rows.shape[1]} entries; they must have {len(vector)}."
        )


def messages_of(instructions: Instructions, block: Block) -> Iterator[Message]:
    """Flower replies of a block's clients: their own parameters and what they report."""
    node_of = dict(
        zip(instructions.client_ids.tolist(), instructions.node_ids.tolist(), strict=True)
    )
    shapes = tensors(instructions.arrays)
    for index, client_id in enumerate(block.client_ids.tolist()):
        request = Message(RecordDict(), node_of[client_id], instructions.message_type)
        if (reason := block.reasons.get(client_id)) is not None:
            if reason not in SILENT:
                code = BUDGET_SPENT if reason == "budget" else CLIENT_RAISED
                yield error_reply(request, code, f"client {client_id} failed: {reason}")
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
            values = vector[start:stop].reshape(tensor.shape).to(tensor.dtype)
            record[name] = LazyArray(values)
            start = stop
        else:
            record[name] = LazyArray(tensor)
    return record


def _scalar(name: str, value: np.float64) -> int | float:
    return int(value) if name == "num-examples" else float(value)
