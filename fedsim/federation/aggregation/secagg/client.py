"""What a client answers at each stage of secure aggregation.

What it keeps between the stages is in its context's state, under the round's context, and is wiped
with its last answer: whatever is asked again finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedsim.errors import FedsimError
from fedsim.federation.aggregation.secagg.primitives import (
    KEY_BYTES,
    SHARE_BYTES,
    Words,
    agreed_key,
    derived_key,
    mask,
    new_key,
    new_seed,
    public_key,
    seal,
    split_secret,
    unseal,
)
from fedsim.federation.aggregation.secagg.transcript import (
    RECORD,
    SEALED_BYTES,
    byte_strings,
    channel_purpose,
    entries_of,
    join_shares,
    numbers,
    own_purpose,
    pair_purpose,
)

_KEPT = "fedsim.secagg"


def answer(
    message: Message, context: Context, client: int, threshold: int, vector: Callable[[], Words]
) -> Message:
    """The reply to a message of the protocol.

    Parameters
    ----------
    threshold : int
        The config's: with fewer survivors nothing is unmasked.
    vector : callable
        What is to be masked; called at that stage alone.

    Raises
    ------
    FedsimError
        If the message is not what the protocol allows at this point.
    """
    entries = entries_of(message)
    stage = entries["stage"]
    reply: dict[str, Any]
    if stage == "keys":
        reply = _keys(entries, context)
    elif stage == "shares":
        reply = _shares(entries, context, client, threshold)
    elif stage == "masked":
        reply = _masked(entries, context, client, threshold, vector)
    else:
        reply = _unmask(entries, context, client, threshold)
    return Message(RecordDict({RECORD: ConfigRecord({**reply})}), reply_to=message)


def _kept(entries: ConfigRecord, context: Context, stage: str) -> dict[str, Any]:
    """What the client keeps of this round, where this stage is the next one."""
    kept = context.state.config_records.get(_KEPT)
    if kept is None or kept["context"] != entries.get("context") or kept["next"] != stage:
        raise FedsimError(
            f"the stage '{stage}' of secure aggregation is asked for out of turn, or once more."
        )
    return dict(kept)


def _keep(context: Context, kept: dict[str, Any]) -> None:
    context.state[_KEPT] = ConfigRecord(kept)


def _keys(entries: ConfigRecord, context: Context) -> dict[str, bytes]:
    """New keys, for this round alone; what was kept of an unfinished one is gone."""
    round_context = entries.get("context")
    if not isinstance(round_context, bytes):
        raise FedsimError("a message of secure aggregation has no context.")
    mask_key, channel_key, seed = new_key(), new_key(), new_seed()
    secrets = {"mask-key": mask_key, "channel-key": channel_key, "seed": seed}
    _keep(context, {"context": round_context, "next": "shares", **secrets})
    return {"mask-key": public_key(mask_key), "channel-key": public_key(channel_key)}


def _shares(
    entries: ConfigRecord, context: Context, client: int, threshold: int
) -> dict[str, list[bytes]]:
    """Shares of the client's two secrets, sealed for each of the others, and its own for itself."""
    kept = _kept(entries, context, "shares")
    clients = numbers(entries, "clients")
    mask_keys = byte_strings(entries, "mask-keys", len(clients), KEY_BYTES)
    channel_keys = byte_strings(entries, "channel-keys", len(clients), KEY_BYTES)
    if len(clients) < threshold or client not in clients:
        raise FedsimError(
            f"secure aggregation among {len(clients)} clients; it must be among at least "
            f"secagg.threshold = {threshold}, this one included."
        )
    place = clients.index(client)
    own = public_key(kept["mask-key"]), public_key(kept["channel-key"])
    distinct = len({*mask_keys, *channel_keys}) == 2 * len(clients)
    if (mask_keys[place], channel_keys[place]) != own or not distinct:
        raise FedsimError("the list of public keys has another key of this client, or one twice.")
    round_context = kept["context"]
    of_key = split_secret(kept["mask-key"], threshold, len(clients))
    of_seed = split_secret(kept["seed"], threshold, len(clients))
    sealed = []
    for number, other in enumerate(clients):
        joined = join_shares(of_key[number], of_seed[number])
        if other == client:
            # What a client keeps for itself is no message: the server gets noughts in its place.
            kept["own-share"] = joined
            sealed.append(bytes(SEALED_BYTES))
            continue
        purpose = channel_purpose(round_context, client, other)
        key = agreed_key(kept["channel-key"], channel_keys[number], purpose)
        sealed.append(seal(key, joined, round_context))
    keys = {"mask-keys": mask_keys, "channel-keys": channel_keys}
    _keep(context, {**kept, "next": "masked", "clients": clients, **keys})
    return {"sealed": sealed}


def _masked(
    entries: ConfigRecord,
    context: Context,
    client: int,
    threshold: int,
    vector: Callable[[], Words],
) -> dict[str, bytes]:
    """The vector, with the client's own mask and one for each other client."""
    kept = _kept(entries, context, "masked")
    others = numbers(entries, "senders")
    sealed = byte_strings(entries, "sealed", len(others), SEALED_BYTES)
    clients: list[int] = kept["clients"]
    if not {*others} <= {*clients} - {client} or len(others) + 1 < threshold:
        raise FedsimError("the list of those who sent shares is not of this round, or too short.")
    round_context = kept["context"]
    mask_keys = dict(zip(clients, kept["mask-keys"], strict=True))
    channel_keys = dict(zip(clients, kept["channel-keys"], strict=True))
    received = []
    for other, text in zip(others, sealed, strict=True):
        purpose = channel_purpose(round_context, other, client)
        key = agreed_key(kept["channel-key"], channel_keys[other], purpose)
        received.append(unseal(key, text, round_context))
    masked = vector().copy()
    masked += mask(derived_key(kept["seed"], own_purpose(round_context)), len(masked))
    for other in others:
        purpose = pair_purpose(round_context, mask_keys[client], mask_keys[other])
        common = mask(agreed_key(kept["mask-key"], mask_keys[other], purpose), len(masked))
        masked = masked + common if client < other else masked - common
    _keep(context, {**kept, "next": "unmask", "senders": others, "received": received})
    return {"masked": masked.astype("<u8").tobytes()}


def _unmask(
    entries: ConfigRecord, context: Context, client: int, threshold: int
) -> dict[str, list[bytes]]:
    """A share of the mask of each survivor, and of the key of each of those who are gone."""
    kept = _kept(entries, context, "unmask")
    survivors = numbers(entries, "survivors")
    senders: list[int] = [*kept["senders"], client]
    if len(survivors) < threshold or client not in survivors or not {*survivors} <= {*senders}:
        raise FedsimError(
            f"{len(survivors)} survivors of secure aggregation; they must be at least "
            f"secagg.threshold = {threshold} of this round, this client included."
        )
    shares = dict(zip(senders, [*kept["received"], kept["own-share"]], strict=True))
    # Never both of one client: its vector would lie open.
    answers = [
        shares[other][SHARE_BYTES:] if other in survivors else shares[other][:SHARE_BYTES]
        for other in sorted(senders)
    ]
    del context.state[_KEPT]
    return {"shares": answers}
