"""Messages of shares: what a client sends where the server is not to see its update.

The strategy says with what noise (``share-*`` entries of the message's config), and what of the
mechanism's state it takes to bound a row (an array record named `STATE_RECORD`); the client
bounds and noises its row and replies that, an array record with the one entry ``share``, and
nothing else about its data.
"""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedsim.mechanisms import Mechanism, NoiseSource
from fedsim.randomness import Purpose, Randomness
from fedsim.rows import Layout
from fedsim.training.shares import ShareRequest, share

__all__ = ["SHARE", "SIDE_PREFIX", "STATE_RECORD", "USABLE", "asks_for_share", "share_reply"]

STATE_RECORD = "mechanism-state"
SHARE = "share"
USABLE = "share-usable"
SIDE_PREFIX = "share-side."


def asks_for_share(message: Message) -> ConfigRecord | None:
    """The config record that asks for a share, if there is one."""
    for record in message.content.config_records.values():
        if "share-asked" in record:
            return record
    return None


def share_reply(
    mechanism: Mechanism,
    row: Tensor,
    layout: Layout,
    reported: dict[str, float],
    message: Message,
    request: ConfigRecord,
    randomness: Randomness,
    client: int,
) -> RecordDict:
    """Content of the reply.

    Parameters
    ----------
    row : Tensor ``[d]``
        The client's update, in this layout.
    reported : mapping of name to float
        From which the mechanism's side scalars are taken; the rest stays here.
    randomness : Randomness
        Where the client's noise comes from.
    """
    bounding = message.content.array_records[STATE_RECORD].to_torch_state_dict()
    asked = ShareRequest.read(request, mechanism)
    # Of the strategy's release: an engine in its process would have made the same share.
    generator = Randomness(randomness.seed, asked.release or None).generator(
        Purpose.SHARE, level="client", round=_whole(request, "server-round"), client=client
    )
    shares = share(
        asked,
        row.unsqueeze(0),
        bounding,
        layout,
        sources=[NoiseSource(generator, hardened=asked.noise.hardened)],
        sides={name: np.array([reported[name]]) for name in mechanism.side_names},
    )
    metrics = {f"{SIDE_PREFIX}{name}": float(value[0]) for name, value in shares.sides.items()}
    return RecordDict(
        {
            "arrays": ArrayRecord({SHARE: Array(shares.rows[0].cpu().numpy())}),
            "metrics": MetricRecord({USABLE: int(shares.usable[0]), **metrics}),
        }
    )


def _whole(request: ConfigRecord, key: str) -> int:
    value = request[key]
    if not isinstance(value, int):
        raise ValueError(f"the message's {key} is {value!r}; it must be a whole number.")
    return value
