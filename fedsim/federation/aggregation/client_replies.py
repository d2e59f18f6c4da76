"""A client's reply to a request for training: its update, a share, or a stage of a masked sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from flwr.app import Context, Message, RecordDict

from fedsim.federation.aggregation.secagg import SecureAggregation
from fedsim.federation.aggregation.secagg.client import answer
from fedsim.federation.aggregation.secagg.protocol import stage_of
from fedsim.federation.aggregation.shares import Shares, share_entries
from fedsim.federation.flower_internals import client_id

NoisePlacement: TypeAlias = SecureAggregation | Literal["server", "client"]
"""Where noise is drawn, as ``placement`` of `fedsim.strategies.DPFedAvg`."""


def training_reply(
    message: Message,
    context: Context,
    placement: NoisePlacement,
    *,
    share: Callable[[], Shares],
    update: Callable[[], RecordDict],
) -> RecordDict:
    """The content of a client's reply.

    Parameters
    ----------
    message, context
    placement : NoisePlacement
        That of the client's own config. Without secure aggregation there the client takes no part
        in it.
    share, update : callable
        Train, and return the client's noisy share, or its update. Of the stages of secure
        aggregation only "masked" trains.

    Raises
    ------
    FedsimError
        If the message asks for what the client does not do.
    """
    if stage_of(message) is not None:
        threshold = placement.threshold if isinstance(placement, SecureAggregation) else 0
        client = client_id(context.node_config)
        return answer(message, context, client, threshold, lambda: share().words()[0])
    if share_entries(message) is not None:
        return share().reply()
    return update()
