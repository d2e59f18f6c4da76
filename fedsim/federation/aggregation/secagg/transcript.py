"""The messages of secure aggregation: their entries, and what each derived key is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from flwr.app import ConfigRecord, Message

from fedsim.errors import FedsimError
from fedsim.federation.aggregation.secagg.primitives import SHARE_BYTES

RECORD = "secagg"
"""Name of the config record of a message of the protocol, and of its reply."""
Stage = Literal["keys", "shares", "masked", "unmask"]
PREFIX = b"fedsim-secagg-1"
MOST_CLIENTS = 100_000


def context_of(run: str, server_round: int, nonce: bytes) -> bytes:
    """What binds keys and sealed messages to one attempt at a round."""
    return b"|".join([PREFIX, run.encode(), str(server_round).encode(), nonce])


def channel_purpose(context: bytes, sender: int, receiver: int) -> bytes:
    """Of the key that seals what one client sends another."""
    return b"|".join([context, b"channel", str(sender).encode(), str(receiver).encode()])


def pair_purpose(context: bytes, first: bytes, second: bytes) -> bytes:
    """Of the mask that two clients share, by their public keys."""
    return b"|".join([context, b"pair", min(first, second), max(first, second)])


def own_purpose(context: bytes) -> bytes:
    """Of a client's own mask."""
    return context + b"|self"


def stage_of(message: Message) -> Stage | None:
    """Which stage of the protocol a message is of; None for any other message."""
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
    """Distinct whole numbers, 0 or more.

    Raises
    ------
    FedsimError
        If the record has something else.
    """
    entries = record.get(name)
    listed: list[Any] = entries if isinstance(entries, list) else [None]
    sound = all(type(entry) is int and 0 <= entry < 2**63 for entry in listed)
    if not sound or len(set(listed)) != len(listed) or len(listed) > MOST_CLIENTS:
        raise FedsimError(f"'{name}' of a message of secure aggregation is no list of clients.")
    return listed


def byte_strings(record: Mapping[str, object], name: str, count: int, size: int) -> list[bytes]:
    """So many byte strings of one size.

    Raises
    ------
    FedsimError
        If the record has something else.
    """
    entries = record.get(name)
    listed = entries if isinstance(entries, list) else []
    if len(listed) != count or not all(type(e) is bytes and len(e) == size for e in listed):
        raise FedsimError(
            f"'{name}' of a message of secure aggregation is not {count} times {size} bytes."
        )
    return listed


def byte_string(record: Mapping[str, object], name: str, size: int) -> bytes:
    """One byte string of this size.

    Raises
    ------
    FedsimError
        If the record has something else.
    """
    entry = record.get(name)
    if not isinstance(entry, bytes) or len(entry) != size:
        raise FedsimError(f"'{name}' of a message of secure aggregation is not {size} bytes.")
    return entry


SEALED_BYTES = 2 * SHARE_BYTES + 16
"""Shares of two secrets, sealed."""


def join_shares(key_share: int, seed_share: int) -> bytes:
    """What one client sends another: a share of its mask key, and one of its seed."""
    return key_share.to_bytes(SHARE_BYTES) + seed_share.to_bytes(SHARE_BYTES)
