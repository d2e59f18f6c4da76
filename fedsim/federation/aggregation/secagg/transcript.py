"""Messages of secure aggregation: how entries are read, and the purposes of derived keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from flwr.app import ConfigRecord, Message

from fedsim.errors import FedsimError
from fedsim.federation.aggregation.secagg.primitives import SHARE_BYTES

RECORD = "secagg"
"""Name of the config record in the protocol's messages and replies."""
Stage = Literal["keys", "shares", "masked", "unmask"]
PREFIX = b"fedsim-secagg-1"
MOST_CLIENTS = 100_000


def context_of(run: str, server_round: int, nonce: bytes) -> bytes:
    """Byte string that binds keys and sealed messages to one attempt at a round."""
    return b"|".join([PREFIX, run.encode(), str(server_round).encode(), nonce])


def channel_purpose(context: bytes, sender: int, receiver: int) -> bytes:
    """Purpose of the key that seals one client's shares for another."""
    return b"|".join([context, b"channel", str(sender).encode(), str(receiver).encode()])


def pair_purpose(context: bytes, first: bytes, second: bytes) -> bytes:
    """Purpose of the mask between two clients, in either order of their public keys."""
    return b"|".join([context, b"pair", min(first, second), max(first, second)])


def own_purpose(context: bytes) -> bytes:
    """Purpose of a client's own mask."""
    return context + b"|self"


def stage_of(message: Message) -> Stage | None:
    """The protocol stage of a message; None if the message is not of the protocol."""
    if not message.has_content():
        return None
    record = message.content.config_records.get(RECORD)
    stage = None if record is None else record.get("stage")
    return stage if stage in ("keys", "shares", "masked", "unmask") else None  # type: ignore[return-value]


def entries_of(message: Message) -> ConfigRecord:
    """The protocol's record of a message.

    Raises
    ------
    FedsimError
        If there is none.
    """
    record = message.content.config_records.get(RECORD)
    if record is None:
        raise FedsimError("a message of secure aggregation lacks its record.")
    return record


def numbers(record: Mapping[str, object], name: str) -> list[int]:
    """A record's list of distinct integers, 0 or more.

    Raises
    ------
    FedsimError
        If the entry is anything else.
    """
    entries = record.get(name)
    listed: list[Any] = entries if isinstance(entries, list) else [None]
    sound = all(type(entry) is int and 0 <= entry < 2**63 for entry in listed)
    if not sound or len(set(listed)) != len(listed) or len(listed) > MOST_CLIENTS:
        raise FedsimError(f"'{name}' of a message of secure aggregation is not a list of clients.")
    return listed


def byte_strings(record: Mapping[str, object], name: str, count: int, size: int) -> list[bytes]:
    """A record's list of ``count`` byte strings of one size.

    Raises
    ------
    FedsimError
        If the entry is anything else.
    """
    entries = record.get(name)
    listed = entries if isinstance(entries, list) else []
    if len(listed) != count or not all(type(e) is bytes and len(e) == size for e in listed):
        raise FedsimError(
            f"'{name}' of a message of secure aggregation is not {count} times {size} bytes."
        )
    return listed


def byte_string(record: Mapping[str, object], name: str, size: int) -> bytes:
    """A record's byte string of this size.

    Raises
    ------
    FedsimError
        If the entry is anything else.
    """
    entry = record.get(name)
    if not isinstance(entry, bytes) or len(entry) != size:
        raise FedsimError(f"'{name}' of a message of secure aggregation is not {size} bytes.")
    return entry


SEALED_BYTES = 2 * SHARE_BYTES + 16
"""Length of the shares of two secrets, sealed (with a tag of 16 bytes)."""


def join_shares(key_share: int, seed_share: int) -> bytes:
    """Concatenate a share of a client's mask key and one of its seed, for another client."""
    return key_share.to_bytes(SHARE_BYTES) + seed_share.to_bytes(SHARE_BYTES)
