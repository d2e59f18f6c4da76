"""Running a block trainer so that one client's failure stays its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from fedsim.errors import BudgetSpentError
from fedsim.federation.exchange import MessageType
from fedsim.rows.block import Block, BlockTrainer, Ids, MalformedBlockError, Reason

log = logging.getLogger(__name__)


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
