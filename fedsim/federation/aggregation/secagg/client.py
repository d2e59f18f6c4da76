"""A client's replies at each stage of secure aggregation.

Between stages its secrets are stored in the state of Flower's context, bound to the round's
protocol context. The last stage deletes them, so that no stage can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedsim.errors import FedsimError
from fedsim.federation.aggregation.secagg.protocol import (
    KEY_BYTES,
    RECORD,
    SEALED_BYTES,
    SHARE_BYTES,
    Words,
    agreed_key,
    byte_strings,
    channel_purpose,
    derived_key,
    entries_of,
    join_shares,
    mask,
    new_key,
    new_seed,
    numbers,
    own_purpose,
    pair_purpose,
    public_key,
    seal,
    split_secret,
    unseal,
)

_STATE = "fedsim.secagg"


def answer(
    message: Message, context: Context, client: int, threshold: int, vector: Callable[[], Words]
) -> RecordDict:
    """The content of the reply to a message of the protocol.

    Parameters
    ----------
    threshold : int
        Minimum number of survivors, from the client's own config, for the sum to be unmasked.
    vector : callable
        Makes the vector to mask; called only at the stage "masked".

    Raises
    ------
    FedsimError
        If the protocol does not allow this message at this point.
    """
    if threshold < 2:
        raise FedsimError("this client takes no part in secure aggregation (secagg.threshold).")
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
    return RecordDict({RECORD: ConfigRecord({**reply})})


def _state_before(entries: ConfigRecord, context: Context, stage: str) -> dict[str, Any]:
    """The client's secrets of this round, if this stage is the next one.

    Each stage is answered once. A server that could repeat one, with another list of clients, would
    learn both shares of one client's secrets, or two vectors under one mask.

    Raises
    ------
    FedsimError
        If another stage is next, or another protocol context is in progress.
    """
    state = context.state.config_records.get(_STATE)
    if state is None or state["context"] != entries.get("context") or state["next"] != stage:
        raise FedsimError(f"the stage '{stage}' of secure aggregation is out of turn, or repeated.")
    return dict(state)


def _store(context: Context, state: dict[str, Any]) -> None:
    context.state[_STATE] = ConfigRecord(state)


def _keys(entries: ConfigRecord, context: Context) -> dict[str, bytes]:
    """Generate keys for this round only; keys of an unfinished round are overwritten."""
    round_context = entries.get("context")
    if not isinstance(round_context, bytes):
        raise FedsimError("a message of secure aggregation has no context.")
    mask_key, channel_key, seed = new_key(), new_key(), new_seed()
    secrets = {"mask-key": mask_key, "channel-key": channel_key, "seed": seed}
    _store(context, {"context": round_context, "next": "shares", **secrets})
    return {"mask-key": public_key(mask_key), "channel-key": public_key(channel_key)}


def _shares(
    entries: ConfigRecord, context: Context, client: int, threshold: int
) -> dict[str, list[bytes]]:
    """Split the client's two secrets, and seal a share of each for every other client."""
    state = _state_before(entries, context, "shares")
    clients = numbers(entries, "clients")
    mask_keys = byte_strings(entries, "mask-keys", len(clients), KEY_BYTES)
    channel_keys = byte_strings(entries, "channel-keys", len(clients), KEY_BYTES)
    if len(clients) < threshold or client not in clients:
        raise FedsimError(
            f"secure aggregation among {len(clients)} clients; it must be among at least "
            f"secagg.threshold = {threshold}, this one included."
        )
    place = clients.index(client)
    own_keys = public_key(state["mask-key"]), public_key(state["channel-key"])
    # If the server replaced this client's key, or listed one key twice (of its own, perhaps), it
    # could know a mask between two honest clients.
    distinct = len({*mask_keys, *channel_keys}) == 2 * len(clients)
    if (mask_keys[place], channel_keys[place]) != own_keys or not distinct:
        raise FedsimError("the list of public keys has another key of this client, or one twice.")
    round_context = state["context"]
    of_key = split_secret(state["mask-key"], threshold, len(clients))
    of_seed = split_secret(state["seed"], threshold, len(clients))
    sealed = []
    for number, other in enumerate(clients):
        both_shares = join_shares(of_key[number], of_seed[number])
        if other == client:
            # A client's own shares never leave it: the server gets zeros in their place.
            state["own-share"] = both_shares
            sealed.append(bytes(SEALED_BYTES))
            continue
        purpose = channel_purpose(round_context, client, other)
        key = agreed_key(state["channel-key"], channel_keys[number], purpose)
        sealed.append(seal(key, both_shares, round_context))
    keys = {"mask-keys": mask_keys, "channel-keys": channel_keys}
    _store(context, {**state, "next": "masked", "clients": clients, **keys})
    return {"sealed": sealed}


def _masked(
    entries: ConfigRecord,
    context: Context,
    client: int,
    threshold: int,
    vector: Callable[[], Words],
) -> dict[str, bytes]:
    """The vector, with the client's own mask and one mask for each pair with another client."""
    state = _state_before(entries, context, "masked")
    senders = numbers(entries, "senders")
    sealed = byte_strings(entries, "sealed", len(senders), SEALED_BYTES)
    clients: list[int] = state["clients"]
    if not {*senders} <= {*clients} - {client} or len(senders) + 1 < threshold:
        raise FedsimError("the list of clients that sent shares is of another round, or too short.")
    round_context = state["context"]
    mask_keys = dict(zip(clients, state["mask-keys"], strict=True))
    channel_keys = dict(zip(clients, state["channel-keys"], strict=True))
    received_shares = []
    for other, text in zip(senders, sealed, strict=True):
        purpose = channel_purpose(round_context, other, client)
        key = agreed_key(state["channel-key"], channel_keys[other], purpose)
        received_shares.append(unseal(key, text, round_context))
    # A vector that arrives late, after the other clients have revealed this client's mask key, is
    # protected by its own mask alone, whose seed is revealed for survivors only.
    masked = vector().copy()
    masked += mask(derived_key(state["seed"], own_purpose(round_context)), len(masked))
    # Of two clients the first adds their common mask and the second subtracts it.
    for other in senders:
        purpose = pair_purpose(round_context, mask_keys[client], mask_keys[other])
        common = mask(agreed_key(state["mask-key"], mask_keys[other], purpose), len(masked))
        masked = masked + common if client < other else masked - common
    _store(context, {**state, "next": "unmask", "senders": senders, "received": received_shares})
    return {"masked": masked.astype("<u8").tobytes()}


def _unmask(
    entries: ConfigRecord, context: Context, client: int, threshold: int
) -> dict[str, list[bytes]]:
    """Shares of the seeds of survivors, and of the mask keys of clients that dropped out."""
    state = _state_before(entries, context, "unmask")
    survivors = numbers(entries, "survivors")
    senders: list[int] = [*state["senders"], client]
    if len(survivors) < threshold or client not in survivors or not {*survivors} <= {*senders}:
        raise FedsimError(
            f"{len(survivors)} survivors of secure aggregation; they must be at least "
            f"secagg.threshold = {threshold} of this round, this client included."
        )
    shares = dict(zip(senders, [*state["received"], state["own-share"]], strict=True))
    # Never both of one client: with both, the server could remove all masks of its vector.
    answers = [
        shares[other][SHARE_BYTES:] if other in survivors else shares[other][:SHARE_BYTES]
        for other in sorted(senders)
    ]
    del context.state[_STATE]
    return {"shares": answers}
