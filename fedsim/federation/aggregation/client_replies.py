"""A client's reply to a request for training: its update, a share, or a stage of a masked sum."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context, Message, RecordDict

from fedsim.federation.aggregation.secagg.client import answer
from fedsim.federation.aggregation.secagg.protocol import stage_of
from fedsim.federation.aggregation.shares import Shares, share_entries
from fedsim.federation.flower_internals import client_id


def training_reply(
    message: Message,
    context: Context,
    threshold: int,
    *,
    share: Callable[[], Shares],
    update: Callable[[], RecordDict],
) -> RecordDict:
    """The content of a client's reply.

    Parameters
    ----------
    message, context
    threshold : int
        Fewest clients in a masked sum, by the client's own config; 0 if it takes part in none.
    share, update : callable
        Train, and return the client's noisy share, or its update. Of the stages of secure
        aggregation only "masked" trains.

    Raises
    ------
    FedsimError
        If the message asks for what the client does not do.
    """
    if stage_of(message) is not None:
        client = client_id(context.node_config)
        return answer(message, context, client, threshold, lambda: share().words()[0])
    if share_entries(message) is not None:
        return share().reply()
    return update()
