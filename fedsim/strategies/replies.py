"""From Flower reply messages to blocks, trusting nothing that they say."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor

from fedsim.engines.arrays import tensors
from fedsim.rows.exchange import Block
from fedsim.rows.layout import Layout
from fedsim.training.shares import SHARE, USABLE

__all__ = ["blocks_from_messages", "metrics_of", "to_arrays"]

_log = logging.getLogger("fedsim")


def blocks_from_messages(
    replies: Iterable[Message],
    client_of: Mapping[int, int],
    layout: Layout | None,
    vector: Tensor | None,
    arrayrecord_key: str,
    *,
    shares: bool = False,
) -> Iterator[Block]:
    """One block for each usable reply.

    Errors, replies from nodes that were not asked, and payloads with missing, surplus or
    misshapen arrays are logged and left out.

    Parameters
    ----------
    client_of : mapping of node id to client id
        Those who were asked.
    layout, vector : Layout and Tensor ``[d]``, or None
        To compute updates against; None for an evaluation, whose replies carry no arrays.
    shares : bool
        Whether the clients bound and noise their own rows: ``rows`` are then those shares.
    """
    for reply in replies:
        node = reply.metadata.src_node_id
        if reply.has_error():
            _log.warning("node %s failed: %s", node, reply.error.reason)
            continue
        client = client_of.get(node)
        if client is None:
            _log.warning("a reply from node %s, which was not asked, is left out.", node)
            continue
        rows = None
        if layout is not None and vector is not None:
            try:
                rows = (
                    _share(reply, layout)
                    if shares
                    else _update(reply, layout, vector, arrayrecord_key)
                )
            except (ValueError, TypeError, KeyError, RuntimeError, EOFError, OSError) as error:
                _log.warning("the reply of client %s is left out: %s", client, error)
                continue
        yield Block.sent(
            np.array([client], dtype=np.int64),
            rows,
            {key: np.array([value]) for key, value in metrics_of(reply).items()},
        )


def metrics_of(reply: Message) -> dict[str, float]:
    """Every number in a reply's metric records."""
    return {
        key: float(value)
        for record in reply.content.metric_records.values()
        for key, value in record.items()
        if isinstance(value, int | float)
    }


def _update(reply: Message, layout: Layout, vector: Tensor, key: str) -> Tensor:
    arrays = tensors(_arrays_of(reply, key))
    surplus = set(arrays) - {entry.name for entry in layout.entries} - set(layout.kept)
    if surplus:
        raise ValueError(f"it has arrays that the model has not: {', '.join(sorted(surplus))}.")
    for entry in layout.entries:
        if entry.name in arrays and not arrays[entry.name].is_floating_point():
            raise ValueError(f"parameter '{entry.name}' is not floating point.")
    return (layout.flatten(arrays).to(vector.device) - vector).unsqueeze(0)


def _share(reply: Message, layout: Layout) -> Tensor:
    if USABLE not in metrics_of(reply):
        raise ValueError("it is no share; the client app must bound and noise its own update.")
    share = tensors(_arrays_of(reply, "arrays")).get(SHARE)
    if share is None or share.shape != (layout.d,) or share.dtype != torch.float64:
        raise ValueError(f"its share is not float64 [{layout.d}].")
    return share.unsqueeze(0)


def _arrays_of(reply: Message, key: str) -> ArrayRecord:
    records = reply.content.array_records
    if key in records:
        return records[key]
    if len(records) != 1:
        raise ValueError(f"it has {len(records)} array records and none is called '{key}'.")
    return next(iter(records.values()))


def to_arrays(vector: Tensor, layout: Layout, server: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named parameters of ``vector [d]``; entries outside the layout keep the server's value."""
    moved = layout.unflatten(vector)
    dtypes = {entry.name: entry.dtype for entry in layout.entries}
    return {
        name: moved[name].to(dtypes[name]) if name in dtypes else torch.as_tensor(value)
        for name, value in server.items()
    }
